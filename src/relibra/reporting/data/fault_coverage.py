"""Fault coverage: share of the load whose expert keeps an instance if a rank is lost (Chameleon, arXiv 2508.21613).

Replicas cover weights, not optimizer states: those are at homes only.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

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
    """Return the share over all layers, weighted by load; 1 for a step without load."""
    load_L = demand.load_MLE.sum(axis=(0, 2), dtype=np.float64)
    if not load_L.any():
        return np.ones(plan.num_ranks)
    return np.average(replica_cover(plan, demand), axis=0, weights=load_L)
