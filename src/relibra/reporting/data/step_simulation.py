"""A compared step, simulated on its cluster: seconds, memory, and events of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relibra.reporting.data.compared_plans import ComparedStep
from relibra.simulation import (
    MemoryUse,
    SimulatedStep,
    memory_use,
    simulate_step,
    simulated_timeline,
    with_mini_batches,
)
from relibra.timeline import Timeline

MOE_TERMS = ("compute", "exchange", "gates", "copies", "relocation")
"""Parts of a simulated step that belong to its expert layers."""

MAX_RANKS = 6
"""Ranks of a timeline on a page."""


class StepSimulation(NamedTuple):
    """Simulated seconds of both plans, and the memory of the second."""

    before: SimulatedStep
    after: SimulatedStep
    memory: MemoryUse

    def term(self, name: str) -> tuple[float, float]:
        """Return the seconds of one part of the step under each plan."""
        return self.before.terms[name], self.after.terms[name]

    @property
    def moe_seconds(self) -> tuple[float, float]:
        """Seconds of the expert layers under each plan: experts, their rows and copies, and relocation."""
        before, after = zip(*(self.term(name) for name in MOE_TERMS), strict=True)
        return sum(before), sum(after)


def simulate_plans(step: ComparedStep) -> StepSimulation:
    """Simulate both plans in one pipeline stage, with an optimizer step per mini-batch and copies overlapped.

    raises     as `simulate_step`
    """
    before, after = (
        simulate_step(compared.plan, demand, step.cluster, step.model, how, distinct=rows)
        for compared, rows in step.plans_with_rows
        for demand, how in (with_mini_batches(compared.demand),)
    )
    demand, how = with_mini_batches(step.after.demand)
    return StepSimulation(before, after, memory_use(step.after.plan, demand, step.cluster, step.model, how))


def simulate_timelines(step: ComparedStep, micro_batch: int) -> tuple[list[tuple[str, Timeline]], list[int]]:
    """Return (name, events of one micro-batch on some ranks) of each plan, and these ranks."""
    ranks = choose_ranks(step.before.rank_load_MLR[micro_batch].sum(axis=0).tolist())
    timelines = [
        (
            compared.name,
            simulated_timeline(
                compared.plan,
                demand,
                step.cluster,
                step.model,
                how,
                ranks=ranks,
                micro_batches=[micro_batch],
                distinct=rows,
            ),
        )
        for compared, rows in step.plans_with_rows
        for demand, how in (with_mini_batches(compared.demand),)
    ]
    return timelines, ranks


def choose_ranks(busy_R: Sequence[float] | Sequence[int], limit: int = MAX_RANKS) -> list[int]:
    """Return the busiest and the least busy rank and some between them by load, in ascending order.

    >>> choose_ranks([3, 9, 1, 4, 5], 3)
    [1, 2, 3]
    """
    order = np.argsort(-np.asarray(busy_R), kind="stable")
    positions = np.unique(np.linspace(0, len(order) - 1, min(limit, len(order))).round().astype(int))
    return sorted(int(rank) for rank in order[positions])
