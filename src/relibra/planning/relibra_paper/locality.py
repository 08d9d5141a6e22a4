"""Sample locality: source ranks of samples with fewer tokens across nodes (ReLibra, arXiv 2605.08639).

Micro-batches and the balance of attention are kept: samples of similar length exchange ranks, within the limits of a
rank, and never so that a micro-batch attends longer. A sample has one rank in all layers, because its activations are
there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import no_type_check

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.compute import busiest_attention_seconds
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.levers.packing import node_loads
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

LENGTH_RATIO = 1.1
"""Largest ratio of lengths of two samples that exchange ranks."""
_SWEEPS = 8
"""Most passes over all pairs; a pass without an exchange ends the search."""


def place_near_experts(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int[ndarray, "L E"]
) -> ScheduledDemand:
    """Return the demand with samples fed from the node of their experts' homes, if rows then travel in less time."""
    cluster = request.cluster
    if cluster.num_nodes == 1:
        return demand
    rank_S = place_samples(
        node_loads(demand, home_LE, cluster.ranks_per_node, cluster.num_nodes),
        demand.micro_batch_S,
        demand.rank_S,
        demand.length_S,
        demand.attention_S,
        cluster.num_ranks,
        cluster.ranks_per_node,
        limits=ScheduleLimits.of_demand(demand, rank_tokens=request.budget.rank_tokens),
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


def place_samples(
    load_SLN: Float32[ndarray, "S L N"],
    micro_batch_S: Int[ndarray, " S"],
    rank_S: Int[ndarray, " S"],
    length_S: Int64[ndarray, " S"],
    attention_S: Int64[ndarray, " S"],
    num_ranks: int,
    ranks_per_node: int,
    *,
    limits: ScheduleLimits,
) -> Int32[ndarray, " S"]:
    """Return source ranks with more token-slots on the node of their expert's home, permuted in each micro-batch.

    load_SLN   token-slots of each sample at the experts of each node, per layer
    limits     the given ranks are within them, and so are the returned ones
    returns    rank of each sample: a permutation of the old ranks in each micro-batch
    """
    gain_SN = load_SLN.sum(axis=1, dtype=np.float64)
    rank_S = rank_S.astype(np.int32)
    if gain_SN.shape[1] < 2:
        return rank_S
    order = np.lexsort((np.arange(len(length_S)), length_S, micro_batch_S))
    order = order[micro_batch_S[order] >= 0]
    bounds = np.append(np.flatnonzero(np.diff(micro_batch_S[order], prepend=-1)), len(order))
    for start, stop in pairwise(bounds):
        members = order[start:stop]
        costs = length_S[members], attention_S[members]
        tokens_R, squares_R = (np.bincount(rank_S[members], of_sample, num_ranks) for of_sample in costs)
        most_2 = np.array([limits.rank_tokens, min(limits.rank_attention, squares_R.max())], dtype=np.float64)
        rank_X, count_R = rank_S[members], np.bincount(rank_S[members], minlength=num_ranks)
        _exchange(
            gain_SN[members],
            *(of_sample.astype(np.float64) for of_sample in costs),
            rank_X,
            np.stack([tokens_R, squares_R]),
            count_R,
            most_2,
            float(squares_R.max()),
            ranks_per_node,
        )
        rank_S[members] = rank_X
    return rank_S


@compiled
@no_type_check
def _exchange(gain_XN, length_X, attention_X, rank_X, cost_2R, count_R, most_2, longest, ranks_per_node) -> None:
    """Exchange ranks of pairs, in order of length, wherever more token-slots then stay on their node and limits hold.

    attention_X   squared lengths, or less where a prompt is shared
    most_2        most tokens and most attention of a rank with more than one sample
    longest       most attention of any rank
    """
    for _ in range(_SWEEPS):
        exchanged = False
        for i in range(len(length_X)):
            for j in range(i + 1, len(length_X)):
                if length_X[j] > LENGTH_RATIO * length_X[i]:
                    break
                a, c = rank_X[i], rank_X[j]
                node_a, node_c = a // ranks_per_node, c // ranks_per_node
                gain = gain_XN[i, node_c] + gain_XN[j, node_a] - gain_XN[i, node_a] - gain_XN[j, node_c]
                if gain <= 0:
                    continue
                more, squares = length_X[j] - length_X[i], attention_X[j] - attention_X[i]  # a gets them, c loses
                if squares < 0 or cost_2R[1, a] + squares > longest:
                    continue
                if count_R[a] > 1 and (cost_2R[0, a] + more > most_2[0] or cost_2R[1, a] + squares > most_2[1]):
                    continue
                cost_2R[0, a] += more
                cost_2R[0, c] -= more
                cost_2R[1, a] += squares
                cost_2R[1, c] -= squares
                rank_X[i], rank_X[j] = c, a
                exchanged = True
        if not exchanged:
            return
