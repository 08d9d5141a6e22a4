"""A compared step, simulated on its cluster: seconds, and events of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.summary import evenly_chosen
from relibra.simulation import SimulatedStep, simulate_step, simulated_timeline, with_mini_batches
from relibra.timeline import Timeline

MAX_RANKS = 6
"""Ranks of a timeline on a page."""


def simulate_plans(step: ComparedStep) -> tuple[SimulatedStep, SimulatedStep]:
    """Simulate both plans in one pipeline stage, with an optimizer step per mini-batch and copies overlapped.

    raises     as `simulate_step`
    """
    before, after = (
        simulate_step(plan.plan, demand, step.cluster, step.model, how, distinct=plan.rows)
        for plan in step.plans
        for demand, how in (with_mini_batches(plan.demand),)
    )
    return before, after


def simulate_timelines(step: ComparedStep, micro_batch: int) -> tuple[list[tuple[str, Timeline]], list[int]]:
    """Return (name, events of one micro-batch on some ranks) of each plan, and these ranks."""
    ranks = choose_ranks(step.before.rank_load_MLR[micro_batch].sum(axis=0).tolist())
    some = {"ranks": ranks, "micro_batches": [micro_batch]}
    timelines = [
        (plan.name, simulated_timeline(plan.plan, demand, step.cluster, step.model, how, distinct=plan.rows, **some))
        for plan in step.plans
        for demand, how in (with_mini_batches(plan.demand),)
    ]
    return timelines, ranks


def choose_ranks(busy_R: Sequence[float] | Sequence[int], limit: int = MAX_RANKS) -> list[int]:
    """Return the busiest and the least busy rank and some between them by load, in ascending order.

    >>> choose_ranks([3, 9, 1, 4, 5], 3)
    [1, 2, 3]
    """
    order = np.argsort(-np.asarray(busy_R), kind="stable")
    return sorted(order[evenly_chosen(len(order), limit)].tolist())
