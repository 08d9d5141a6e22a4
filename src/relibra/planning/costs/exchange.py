"""`ExchangeCosts`: seconds and rows of dispatch and combine.

Dispatch carries a hidden state from its source rank to the rank that computes it, combine carries one back; in the
backward pass their gradients travel the same ways reversed. A rank sends one message to every other rank that gets rows
from it: a link costs alpha x messages + beta x bytes in each direction, both at once; links inside and between nodes
work at the same time. A node's network is shared by its ranks in fixed parts, so the sum over a node can never be
slower than its busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.cluster import Cluster, Link
from relibra.errors import PlanError
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Placement
from relibra.planning.search.parallel_map import parallel_map
from relibra.planning.traffic.traffic import (
    BETWEEN,
    IN,
    INSIDE,
    OUT,
    link_rows,
    send_once_share,
    traffic_of_micro_batch,
)
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeCosts:
    """Exchanges of rows and of gate weights, one pass each.

    dispatch_ML, combine_ML      seconds along the traffic (hidden states; gradients of results) and against it
    gates_ML, gates_back_ML      seconds of the gate weights, one number per token-slot, and of their gradients back
    out_MLR, in_MLR              rows that leave and enter a rank along the traffic
    gates_out_MLR, gates_in_MLR  the same in token-slots: gate weights are never shared between choices
    cross_node_ML                token-slots computed on another node than the one they come from
    """

    dispatch_ML: Float64[ndarray, "M L"]
    combine_ML: Float64[ndarray, "M L"]
    gates_ML: Float64[ndarray, "M L"]
    gates_back_ML: Float64[ndarray, "M L"]
    out_MLR: Float64[ndarray, "M L R"]
    in_MLR: Float64[ndarray, "M L R"]
    gates_out_MLR: Float64[ndarray, "M L R"]
    gates_in_MLR: Float64[ndarray, "M L R"]
    cross_node_ML: Float64[ndarray, "M L"]


def exchange_costs(
    plan: Placement,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    distinct_MLRR: Int[ndarray, "M L R R2"] | None = None,
    *,
    threads: int | None = 1,
) -> ExchangeCosts:
    """Return the exchanges of each micro-batch and layer; seconds are those of the busiest rank and kind of link.

    With co-routing pairs (`demand.pairs_LEE`) a token travels once per destination rank, of which pairs give a lower
    bound (`send_once_share`); without them once per choice, which is the upper bound.

    distinct_MLRR   tokens that travel from rank to rank, counted (`byte_ledger.distinct_rows_of_step`), instead
    threads         micro-batches counted at the same time; None: the cores of this process
    raises          PlanError for pairs of other layers or experts
    """
    M, L, R, _ = plan.replica_MLRB.shape
    share_LR = np.ones((L, R))
    if distinct_MLRR is None and demand.pairs_LEE is not None:
        if demand.pairs_LEE.shape != (*plan.home_LE.shape, plan.num_experts):
            raise PlanError(
                f"pairs have shape {demand.pairs_LEE.shape}: expected layers x experts x experts of the plan"
            )
        share_LR = send_once_share(demand.pairs_LEE, plan.home_LE, R)
    rows_2ML2R, slots_2ML2R = np.zeros((2, M, L, 2, R)), np.zeros((2, M, L, 2, R))
    peers_2ML2R = np.zeros((2, M, L, 2, R), dtype=np.int64)

    def count(m: int) -> None:
        for layers, traffic_LRR in traffic_of_micro_batch(plan, demand, m):
            rows_2L2R, slots_2L2R, peers_2L2R = link_rows(traffic_LRR, share_LR[layers], plan.ranks_per_node)
            if distinct_MLRR is not None:
                counted_LRR = distinct_MLRR[m, layers].astype(np.int64)
                rows_2L2R = link_rows(counted_LRR, share_LR[layers], plan.ranks_per_node)[0]
            rows_2ML2R[:, m, layers], slots_2ML2R[:, m, layers] = rows_2L2R, slots_2L2R
            peers_2ML2R[:, m, layers] = peers_2L2R

    parallel_map(count, M, threads)
    rows_ML2R, slots_ML2R = rows_2ML2R.sum(axis=0), slots_2ML2R.sum(axis=0)
    dispatch_ML, combine_ML = _seconds(rows_2ML2R, peers_2ML2R, cluster, expert.row_bytes)
    gates_ML, gates_back_ML = _seconds(slots_2ML2R, peers_2ML2R, cluster, expert.bytes_per_value)
    return ExchangeCosts(
        dispatch_ML=dispatch_ML,
        combine_ML=combine_ML,
        gates_ML=gates_ML,
        gates_back_ML=gates_back_ML,
        out_MLR=rows_ML2R[:, :, OUT],
        in_MLR=rows_ML2R[:, :, IN],
        gates_out_MLR=slots_ML2R[:, :, OUT],
        gates_in_MLR=slots_ML2R[:, :, IN],
        cross_node_ML=slots_2ML2R[BETWEEN, :, :, OUT].sum(axis=-1),
    )


def _seconds(
    rows_2ML2R: Float64[ndarray, "2 M L 2 R"],
    peers_2ML2R: Int64[ndarray, "2 M L 2 R"],
    cluster: Cluster,
    row_bytes: int,
) -> tuple[Float64[ndarray, "M L"], Float64[ndarray, "M L"]]:
    """Return the seconds of rows along the traffic and against it."""
    bytes_2ML2R = rows_2ML2R * float(row_bytes)
    inside_ML = cluster.intra.seconds(bytes_2ML2R[INSIDE], peers_2ML2R[INSIDE]).max(axis=(-2, -1))

    def busiest_ML(link: Link, way: int) -> Float64[ndarray, "M L"]:
        return link.seconds(bytes_2ML2R[BETWEEN, ..., way, :], peers_2ML2R[BETWEEN, ..., way, :]).max(axis=-1)

    def slowest_ML(sent: int, received: int) -> Float64[ndarray, "M L"]:
        between_ML = np.maximum(busiest_ML(cluster.inter_send, sent), busiest_ML(cluster.inter_receive, received))
        return np.maximum(inside_ML, between_ML)

    return slowest_ML(OUT, IN), slowest_ML(IN, OUT)
