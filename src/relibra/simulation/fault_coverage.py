"""Fault coverage: share of the load whose expert keeps an instance if a rank is lost (Chameleon, arXiv 2508.21613).

Replicas cover weights, not optimizer states: those are at homes only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int16, Int64, Shaped
from numpy import ndarray

from relibra.planning.balancers.shares import optimal_quotas
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand


def replica_cover(plan: StepPlan, demand: ScheduledDemand) -> Float64[ndarray, "L R"]:
    """Return, for the loss of each single rank, the share of a layer's token-slots whose expert has another instance.

    An expert is lost with its home unless a replica sits on another rank in the same micro-batch and layer, whatever
    its quota. Without replicas and with even loads all entries are 1 - 1 / R. A layer without load is covered.

    demand   with the schedule of the plan
    """
    load_MLE, home_LE = demand.load_MLE, plan.home_LE
    L, R = len(home_LE), plan.num_ranks
    spared_MLE = np.zeros(load_MLE.shape, dtype=bool)
    m_X, layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB >= 0)
    expert_X = plan.replica_MLRB[m_X, layer_X, rank_X, slot_X]
    away_X = rank_X != home_LE[layer_X, expert_X]
    spared_MLE[m_X[away_X], layer_X[away_X], expert_X[away_X]] = True
    lost_LE = np.where(spared_MLE, 0, load_MLE).sum(axis=0, dtype=np.float64)
    lost_LR = np.zeros((L, R))
    np.add.at(lost_LR, (np.arange(L)[:, None], home_LE), lost_LE)
    total_L1 = load_MLE.sum(axis=(0, 2), dtype=np.float64)[:, None]
    return 1.0 - np.divide(lost_LR, total_L1, out=np.zeros((L, R)), where=total_L1 > 0)


def step_cover(plan: StepPlan, demand: ScheduledDemand) -> Float64[ndarray, " R"]:
    """Return the mean of `replica_cover` over all layers, weighted by load; 1 for a step without load."""
    load_L = demand.load_MLE.sum(axis=(0, 2), dtype=np.float64)
    if not load_L.any():
        return np.ones(plan.num_ranks)
    return np.average(replica_cover(plan, demand), axis=0, weights=load_L)


def cover_replicas(
    load_E: Shaped[ndarray, " E"], home_E: Shaped[ndarray, " E"], slots_R: Int64[ndarray, " R"]
) -> Int16[ndarray, "R B"]:
    """Return replicas of one layer with the highest cover of the least covered rank.

    The heaviest expert without a replica, of the rank whose loss takes most load along, goes to the rank with most free
    slots (ties: less load, lower id); if only its own rank has any, a replica elsewhere moves there and frees its slot.
    Slots stay empty when every load has a replica.

    slots_R   slots of each rank that may be filled
    """
    R, bare_E = len(slots_R), load_E.astype(np.float64)
    replica_RB = np.full((R, int(slots_R.max(initial=0))), -1, dtype=np.int16)
    free_R, load_R = slots_R.copy(), np.bincount(home_E, bare_E, minlength=R)
    while free_R.any() and bare_E.any():
        source = int(np.bincount(home_E, bare_E, minlength=R).argmax())
        expert = int(np.where(home_E == source, bare_E, -1.0).argmax())
        target: int = min(np.flatnonzero(free_R).tolist(), key=lambda r: (r == source, -free_R[r], load_R[r], r))
        slot = slots_R[target] - free_R[target]
        free_R[target] -= 1
        if target == source:
            away = np.argwhere((replica_RB >= 0) & (home_E[replica_RB] != source) & (np.arange(R) != source)[:, None])
            if not len(away):  # slots elsewhere hold replicas of this rank alone
                return replica_RB
            rank, other = away[0].tolist()
            replica_RB[source, slot] = replica_RB[rank, other]
            target, slot = rank, other
        replica_RB[target, slot] = expert
        load_R[[source, target]] += np.array([-0.5, 0.5]) * bare_E[expert]
        bare_E[expert] = 0.0
    return replica_RB


def cover_plan(plan: StepPlan, demand: ScheduledDemand, slots: int) -> StepPlan:
    """Return a plan with the same homes and schedule whose replicas are chosen for cover, and stay over micro-batches.

    slots    of each rank; token-slots are split so that the busiest rank's load is lowest
    demand   with the schedule of the plan
    """
    load_MLE, slots_R = demand.load_MLE, np.full(plan.num_ranks, slots)
    replica_MLRB = np.full((*load_MLE.shape[:2], plan.num_ranks, slots), -1, dtype=np.int16)
    quota_MLRB = np.zeros(replica_MLRB.shape, dtype=np.int32)
    for layer, home_E in enumerate(plan.home_LE):
        replica_MLRB[:, layer] = cover_replicas(load_MLE[:, layer].sum(axis=0), home_E, slots_R)
        quota_MLRB[:, layer] = optimal_quotas(load_MLE[:, layer], home_E, replica_MLRB[0, layer])
    return with_resident_replicas(plan, replica_MLRB, quota_MLRB)


def with_resident_replicas(plan: StepPlan, replica_MLRB: ndarray, quota_MLRB: ndarray) -> StepPlan:
    """Return a plan with other replicas, on any ranks, in slots of layers; its bound and predictions are dropped."""
    return replace(
        plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB, resident=True, scope="cluster",
        bound_ML=np.zeros_like(plan.bound_ML), predicted={}, considered=(), considered_layers=(),
    )  # fmt: skip
