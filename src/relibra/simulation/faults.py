"""What to do when a rank is lost: policies, scored over the time to the next loss (Chameleon, arXiv 2508.21613).

Nobody knows that time, the horizon, so a score is a curve over it. A policy pauses once, then makes steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.planning.balancers.shares import optimal_quotas
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.fault_coverage import cover_replicas, with_resident_replicas


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a run goes on after the loss of a rank.

    ranks           of the run and its spares; the lost one counts too, unless the run shrinks
    samples         of a step
    step_seconds    of a step from then on
    pause_seconds   before the first new step, those of redone steps included
    """

    policy: str
    ranks: int
    samples: int
    step_seconds: float
    pause_seconds: float = 0.0

    def rate(self, horizon: float) -> float:
        """Return the samples per second until the next loss, which comes after `horizon` seconds; inf: without a loss.

        >>> policy = Recovery(policy="pause", ranks=1, samples=10, step_seconds=1.0, pause_seconds=10.0)
        >>> [policy.rate(horizon) for horizon in (5.0, 20.0, 40.0)]
        [0.0, 5.0, 7.5]
        """
        steady = self.samples / self.step_seconds
        return steady if math.isinf(horizon) else steady * max(0.0, 1.0 - self.pause_seconds / horizon)


def best_policies(recoveries: Sequence[Recovery]) -> list[tuple[float, Recovery]]:
    """Return the best policy of each horizon, as (horizon from which it is best, policy), the shortest horizon first.

    Ties go to the shorter pause, then to the earlier policy.
    """
    crossings = {  # horizons at which the rates of two policies are equal
        (two.pause_seconds * b - one.pause_seconds * a) / (b - a)
        for one in recoveries
        for two in recoveries
        if (b := two.samples / two.step_seconds) > (a := one.samples / one.step_seconds)
    }
    found: list[tuple[float, Recovery]] = []
    starts = sorted({0.0, *(one.pause_seconds for one in recoveries), *(h for h in crossings if h > 0)})
    for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
        inside = start + 1.0 if math.isinf(end) else (start + end) / 2
        best = max(recoveries, key=lambda one: (one.rate(inside), -one.pause_seconds))
        if not found or found[-1][1] is not best:
            found.append((start, best))
    return found


def reroute_slowdown(stages: int, micro_batches: int, replicas: int, lost: Sequence[int]) -> float:
    """Return how much longer a pipeline takes whose lost stages send their micro-batches to peers of other replicas.

    lost      replicas of each stage that are lost, for stages that lost any
    returns   seconds / seconds before, in slots of one forward and backward pass; inf where a stage has no peer left

    >>> [round(reroute_slowdown(4, 16, 4, lost), 2) for lost in ([1], [1, 1], [2], [4])]
    [1.28, 1.56, 1.84, inf]
    """
    if any(number >= replicas for number in lost):
        return math.inf
    slots = stages + micro_batches - 1
    return (slots + sum(micro_batches * number / (replicas - number) for number in lost)) / slots


def without_rank(
    plan: StepPlan, demand: ScheduledDemand, lost: int, *, anew: bool = False
) -> tuple[StepPlan, Int64[ndarray, " R"]]:
    """Return the step that the other ranks make when one is lost, and how many experts each of them fetches for it.

    Samples of the lost rank go to the rank with the fewest tokens. An expert of it goes to the least loaded rank that
    keeps a replica, else to the least loaded of all, which fetches it; token-slots are split anew. Homes stay as they
    are on paper, because all ranks have equally many; the lost rank computes nothing. Slots that all layers share (not
    `plan.resident`) keep no replica for this.

    demand   with the schedule of the plan
    anew     replicas are chosen anew too, and every expert of the lost rank is fetched
    """
    load_MLE, R, B = demand.load_MLE, plan.num_ranks, plan.slots
    alive_R, fetched_R = np.arange(R) != lost, np.zeros(R, dtype=np.int64)
    replica_MLRB, quota_MLRB = (  # a slot more for each expert of the lost rank
        np.concatenate([before, np.full((*before.shape[:3], plan.num_experts // R), empty, before.dtype)], axis=3)
        for before, empty in ((plan.replica_MLRB, -1), (np.zeros_like(plan.quota_MLRB), 0))
    )
    replica_MLRB[:, :, lost] = -1
    for layer, (home_E, load_E) in enumerate(zip(plan.home_LE.astype(np.int64), load_MLE.sum(axis=0), strict=True)):
        held_MRB, of_slots_MRB = replica_MLRB[:, layer, :, :B], quota_MLRB[:, layer, :, :B]
        own = sorted(np.flatnonzero(home_E == lost), key=lambda e: (-load_E[e], e))
        load_R = np.bincount(home_E, load_E, minlength=R)
        for e in own:
            keeps_R = (held_MRB == e).any(axis=2).all(axis=0)
            fetches = anew or not (plan.resident and keeps_R.any())
            home_E[e] = np.where(alive_R if fetches else keeps_R, load_R, np.inf).argmin()
            load_R[home_E[e]] += load_E[e]
            fetched_R[home_E[e]] += fetches
        if anew:
            held_MRB[:] = cover_replicas(load_E, home_E, np.where(alive_R, B, 0))
        held_MRB[(held_MRB >= 0) & (home_E[held_MRB] == np.arange(R)[:, None])] = -1
        for m, held_RB in enumerate(held_MRB):
            of_slots_MRB[m] = optimal_quotas(load_MLE[m : m + 1, layer], home_E, held_RB)[0]
        for b, e in enumerate(own, start=B):
            replica_MLRB[:, layer, home_E[e], b] = e
            of_slots_M = np.where(held_MRB == e, of_slots_MRB, 0).sum(axis=(1, 2))
            quota_MLRB[:, layer, home_E[e], b] = load_MLE[:, layer, e] - of_slots_M
    rank_S, tokens_MR = plan.rank_S.copy(), demand.sum_per_rank(demand.length_S)
    tokens_MR[:, lost] = np.inf
    moved = np.flatnonzero((rank_S == lost) & (plan.micro_batch_S >= 0))
    for s in sorted(moved, key=lambda s: (-demand.length_S[s], s)):
        rank_S[s] = tokens_MR[plan.micro_batch_S[s]].argmin()
        tokens_MR[plan.micro_batch_S[s], rank_S[s]] += demand.length_S[s]
    return replace(with_resident_replicas(plan, replica_MLRB, quota_MLRB), rank_S=rank_S), fetched_R
