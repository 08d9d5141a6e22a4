"""Schedules that relibra tries: samples packed into micro-batches, and placed on the node of their experts."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Float32, Float64, Int
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.compute import busiest_attention_seconds, sample_attention_seconds
from relibra.planning.costs.exchange import rows_per_crossing
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.schedule.limits import ScheduleLimits
from relibra.planning.schedule.locality import place_samples
from relibra.planning.schedule.packing import pack_samples
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

_PACKING_PROPOSALS, _LEAST_PACKING_PROPOSALS = 400_000, 4_000
"""Proposals of a step, divided among its groups by their samples, and the fewest of a group."""


def pack_groups(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int[ndarray, "L E"],
    limits: ScheduleLimits,
    *,
    seed: int,
) -> ScheduledDemand:
    """Pack the micro-batches of each group (mini-batch, expert-data-parallel group); a sample stays in its group.

    The number of proposals is divided among the groups by their samples.
    """
    cluster = request.cluster
    share_SLN = _node_share(demand, home_LE, cluster.ranks_per_node, cluster.num_nodes)
    attention_S = _attention_prices(request, demand)
    micro_batch_S, rank_S = demand.micro_batch_S.astype(np.int32), demand.rank_S.astype(np.int32)
    M = len(demand.load_MLE)
    group_M = np.zeros(M, dtype=np.int32) if demand.group_M is None else demand.group_M
    group_S = np.append(group_M, -1)[micro_batch_S]  # -1, left out, is the last entry
    in_groups = max(1, int((group_S >= 0).sum()))
    for group in range(int(group_M.max(initial=-1)) + 1):
        samples = np.flatnonzero(group_S == group)
        micro_batch_S[samples], rank_S[samples] = pack_samples(
            share_SLN[samples],
            micro_batch_S[samples],
            rank_S[samples],
            demand.length_S[samples],
            cluster.num_ranks,
            group_M == group,
            limits=limits,
            attention_S=attention_S[samples],
            proposals=max(_LEAST_PACKING_PROPOSALS, _PACKING_PROPOSALS * len(samples) // in_groups),
            seed=seed,
        )
    return demand.with_schedule(micro_batch_S, rank_S, cluster.num_ranks, M)


def _attention_prices(request: PlacementRequest, demand: ScheduledDemand) -> Float64[ndarray, " S"]:
    """Return attention seconds of each sample over all layers / seconds of one token-slot on a node.

    Replicas even out the ranks of a node, so that a token-slot takes 3 x the expert's flops and 4 rows from other
    nodes, divided by the ranks per node.
    """
    cluster, expert = request.cluster, request.expert
    remote = (cluster.num_nodes - 1) / cluster.num_nodes
    experts = 3 * expert.flops_per_token_slot / cluster.flops_per_second
    remote *= rows_per_crossing(cluster, demand, request.previous.home_LE)
    rows = 4 * remote * expert.row_bytes / cluster.inter_receive.bytes_per_second
    passes = 3 * len(demand.layer_ids)
    attention_S = passes * sample_attention_seconds(demand, cluster, expert)
    return attention_S / ((experts + rows) / cluster.ranks_per_node)


def place_near_experts(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int[ndarray, "L E"], limits: ScheduleLimits
) -> ScheduledDemand:
    """Return the demand with samples fed from the node of their experts' homes, if rows then travel in less time."""
    cluster = request.cluster
    if cluster.num_nodes == 1:
        return demand
    rank_S = place_samples(
        _node_share(demand, home_LE, cluster.ranks_per_node, cluster.num_nodes),
        demand.micro_batch_S,
        demand.rank_S,
        demand.length_S,
        cluster.num_ranks,
        cluster.ranks_per_node,
        limits=limits,
    )
    if np.array_equal(rank_S, demand.rank_S):
        return demand
    placed = demand.with_schedule(demand.micro_batch_S, rank_S, cluster.num_ranks, len(demand.load_MLE))
    cheaper = _seconds_of_schedule(request, placed, home_LE) < _seconds_of_schedule(request, demand, home_LE)
    return placed if cheaper else demand


def _seconds_of_schedule(request: PlacementRequest, demand: ScheduledDemand, home_LE: Int[ndarray, "L E"]) -> float:
    """Return what source ranks decide: the seconds of exchange, without replicas, and of attention."""
    placement = request.placement(home_LE, *request.empty_slots(), schedule=demand)
    costs = layer_costs(placement, demand, request.cluster, request.expert)
    return float(costs.exchange_ML.sum()) + busiest_attention_seconds(demand, request.cluster, request.expert)


def _node_share(
    demand: ScheduledDemand, home_LE: Int[ndarray, "L E"], ranks_per_node: int, num_nodes: int
) -> Float32[ndarray, "S L N"]:
    """Return each sample's token-slots at the experts of each node."""
    S, L, _ = demand.counts_SLE.shape
    share_SLN = np.zeros((S, L, num_nodes), dtype=np.float32)
    _add_to_nodes(demand.counts_SLE, home_LE // ranks_per_node, share_SLN)
    return share_SLN


@compiled
@no_type_check
def _add_to_nodes(counts_SLE, node_LE, share_SLN) -> None:
    S, L, E = counts_SLE.shape
    for s in range(S):
        for layer in range(L):
            for e in range(E):
                share_SLN[s, layer, node_LE[layer, e]] += counts_SLE[s, layer, e]
