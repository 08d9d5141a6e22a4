"""Limits of a model on a cluster: the overlap ratio, known without simulation, and the largest parts of a step."""

from __future__ import annotations

from typing import NamedTuple

from relibra.cluster import Cluster
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.simulation.step.step_result import SimulatedStep

_SMALLEST_SHARE = 0.01
"""Parts of the step below this share are left out of the limits."""


class StepLimit(NamedTuple):
    """A part of a simulated step, its seconds, and their share of the step."""

    part: str
    seconds: float
    share: float


def overlap_ratio(expert: ExpertShape, bytes_per_second: float, peak_flops_per_second: float) -> float:
    """Return seconds that one token-slot computes in its expert / seconds that it travels, there and back.

    Above 1 a layer could hide its exchange behind its experts, if GEMMs ran at peak and every choice travelled by
    itself. For gated bf16 experts this is 1.5 width x bandwidth / peak: neither hidden, K nor E matter (MegaScale-MoE,
    arXiv 2505.11432).

    bytes_per_second   in one direction

    >>> round(overlap_ratio(ExpertShape(hidden=7168, width=2048), 50e9, 989e12), 2)
    0.16
    """
    computing = expert.flops_per_token_slot / peak_flops_per_second
    return computing / (2 * expert.row_bytes / bytes_per_second)


def overlap_ratios(cluster: Cluster, expert: ExpertShape) -> dict[str, float]:
    """Return the overlap ratio "inside a node" and, where there are several, "between nodes"."""
    links = {"inside a node": cluster.intra}
    if cluster.num_nodes > 1:
        links["between nodes"] = cluster.inter_send
    return {
        where: overlap_ratio(expert, link.bytes_per_second, cluster.peak_flops_per_second)
        for where, link in links.items()
    }


def sustained_overlap_ratios(cluster: Cluster, expert: ExpertShape) -> dict[str, float]:
    """Return `overlap_ratios` at the flops that grouped GEMMs sustain, with which steps are simulated."""
    return {where: ratio / cluster.efficiency for where, ratio in overlap_ratios(cluster, expert).items()}


def step_limits(step: SimulatedStep) -> list[StepLimit]:
    """Return the parts of a step (`step_parts`) that take at least a hundredth of it, the largest first."""
    limits = [StepLimit(part, value, value / (step.seconds or 1.0)) for part, value in step_parts(step).items()]
    large = [limit for limit in limits if limit.share >= _SMALLEST_SHARE]
    return sorted(large, key=lambda limit: (-limit.seconds, limit.part))


def step_parts(step: SimulatedStep) -> dict[str, float]:
    """Return the seconds of each part of a step: its terms; experts (compute) and attention as even part and straggler.

    A straggler is what an even load of all ranks would save.
    """
    parts = dict(step.terms)
    for term, name in (("compute", "experts"), ("attention", "attention")):
        lost = step.straggler_seconds(term)
        parts |= {name: parts.pop(term) - lost, f"{name}, straggler": lost}
    return parts
