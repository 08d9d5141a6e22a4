"""The static layout of plain expert parallelism: expert e on rank e // (E / R), no replicas. Sees nothing."""

from __future__ import annotations

from relibra.planning.balancer import Decision, Question
from relibra.planning.balancers.homes import previous_homes, without_replicas
from relibra.routing.statistics import contiguous_homes


def decide(question: Question) -> Decision:
    """Put the experts back to the static layout (or leave them where they are if homes may not move)."""
    home_LE = previous_homes(question)
    if question.budget.move_homes:
        home_LE[:] = contiguous_homes(home_LE.shape[1], question.cluster.num_ranks)
    return without_replicas(question, home_LE)
