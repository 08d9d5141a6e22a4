"""Experts of a layer that get a new home before a step, with what their moves change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relibra.planning.loads import home_rank_load
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True)
class MovedExpert:
    """An expert, its old and new home rank, and both ranks' loads without replicas, divided by the mean rank's.

    token_slots                  of the expert in the step
    from_load, to_load           of the old and the new home rank if no expert moved
    from_load_now, to_load_now   with all moves of the layer
    local, local_now             share of its token-slots that come from ranks of its home's node, before and after
    """

    expert: int
    token_slots: int
    from_rank: int
    to_rank: int
    from_load: float
    from_load_now: float
    to_load: float
    to_load_now: float
    local: float
    local_now: float


def moved_experts(plan: StepPlan, demand: ScheduledDemand, layer: int) -> list[MovedExpert]:
    """Return the experts of a layer (a row of the plan) whose home changes, those with most token-slots first."""
    before_E, now_E = plan.previous.home_LE[layer].astype(int), plan.home_LE[layer].astype(int)
    load_E = demand.load_MLE[:, layer].sum(axis=0)
    mean = max(1.0, load_E.sum() / plan.num_ranks)
    before_R, now_R = (home_rank_load(load_E[None, None], home_E[None], plan.num_ranks)[0, 0] / mean
                       for home_E in (before_E, now_E))  # fmt: skip
    sent_RE = demand.tokens_MLRE[:, layer].sum(axis=0, dtype=np.int64)
    sent_NE = sent_RE.reshape(plan.num_nodes, plan.ranks_per_node, -1).sum(axis=1)
    moved = np.flatnonzero(before_E != now_E)
    return [
        MovedExpert(
            expert=int(e),
            token_slots=int(load_E[e]),
            from_rank=int(before_E[e]),
            to_rank=int(now_E[e]),
            from_load=float(before_R[before_E[e]]),
            from_load_now=float(now_R[before_E[e]]),
            to_load=float(before_R[now_E[e]]),
            to_load_now=float(now_R[now_E[e]]),
            local=float(sent_NE[before_E[e] // plan.ranks_per_node, e] / max(1, load_E[e])),
            local_now=float(sent_NE[now_E[e] // plan.ranks_per_node, e] / max(1, load_E[e])),
        )
        for e in moved[np.argsort(-load_E[moved], kind="stable")]
    ]
