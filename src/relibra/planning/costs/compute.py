"""Seconds that a rank computes: its experts, and the weights that every token uses."""

from __future__ import annotations

from typing import Any, TypeVar, no_type_check

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Placement
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

Rows = TypeVar("Rows", float, ndarray)


def dense_seconds(cluster: Cluster, rows: Rows, parameters: int, score_flops: ndarray | float = 0.0) -> Rows:
    """Return the forward seconds of rows that all use the same weights: attention, router, dense layers.

    (2 x weights x rows + flops of attention scores) / sustained flops per second, elementwise. Norms and rotations are
    left out.
    """
    flops: Any = 2.0 * parameters * rows + score_flops
    return flops / cluster.flops_per_second


def sample_attention_seconds(demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape) -> Float64[ndarray, " S"]:
    """Return the forward attention of one layer for each sample: projections and scores.

    A sample of n tokens has n (n + 1) / 2 pairs, each of two flops per element of key and value. Expert shapes know
    nothing of heads: 4 hidden^2 weights are assumed, and heads of `hidden` values together. 0 where the choices per
    token are not known.
    """
    if not demand.top_k:
        return np.zeros(len(demand.counts_SLE))
    length_S = demand.length_S.astype(np.float64)
    score_flops = 2.0 * expert.hidden * (demand.attention_S + length_S)
    return dense_seconds(cluster, length_S, 4 * expert.hidden**2, score_flops)


def busiest_attention_M(demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape) -> Float64[ndarray, " M"]:
    """Return the forward attention of the busiest rank in one layer of each micro-batch."""
    seconds_MR = demand.sum_per_rank(sample_attention_seconds(demand, cluster, expert))
    busiest_M: Float64[ndarray, " M"] = seconds_MR.max(axis=1, initial=0.0)
    return busiest_M


def busiest_attention_seconds(demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape) -> float:
    """Return the attention of a step, forward and backward: that of the busiest rank, over micro-batches and layers."""
    return 3.0 * len(demand.layer_ids) * float(busiest_attention_M(demand, cluster, expert).sum())


def expert_seconds(
    plan: Placement, demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape
) -> tuple[Float64[ndarray, "M L R"], Float64[ndarray, "M L R"]]:
    """Return the forward seconds of each rank's experts: those at home, and its replicas.

    Each expert is a GEMM of its own rows (`Cluster.gemm_seconds`), 2 flops per weight and row; backward takes twice as
    long.
    """
    flops, shape = float(expert.flops_per_token_slot), plan.replica_MLRB.shape[:3]
    home_rows_MLE = demand.load_MLE.copy()
    _take_quotas(plan.replica_MLRB, plan.quota_MLRB, home_rows_MLE)
    home_MLR, home_MLE = np.zeros(shape), cluster.gemm_seconds(home_rows_MLE, flops)
    _add_homes(home_MLE, plan.home_LE, home_MLR)
    return home_MLR, cluster.gemm_seconds(plan.quota_MLRB, flops).sum(axis=3)


@compiled
@no_type_check
def _take_quotas(replica_MLRB, quota_MLRB, rows_MLE) -> None:
    """Subtract the token-slots of replicas from those of their experts."""
    M, L, R, B = replica_MLRB.shape
    for m in range(M):
        for layer in range(L):
            for r in range(R):
                for b in range(B):
                    e = replica_MLRB[m, layer, r, b]
                    if e >= 0:
                        rows_MLE[m, layer, e] -= quota_MLRB[m, layer, r, b]


@compiled
@no_type_check
def _add_homes(seconds_MLE, home_LE, seconds_MLR) -> None:
    """Add the seconds of each expert to its home rank."""
    M, L, E = seconds_MLE.shape
    for m in range(M):
        for layer in range(L):
            for e in range(E):
                seconds_MLR[m, layer, home_LE[layer, e]] += seconds_MLE[m, layer, e]
