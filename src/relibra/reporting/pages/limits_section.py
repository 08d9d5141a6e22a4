"""The section that comes first: what limits this model on this cluster, simulated before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.replicas.pricing import predict_planned
from relibra.reporting.data.compared_plans import STATIC, Side, named
from relibra.reporting.data.sentences import percent
from relibra.reporting.html.html import bullets, cards, paragraph, section
from relibra.reporting.html.html_bars import Bar, bar_table
from relibra.reporting.pages.timeline_section import chosen_ranks
from relibra.simulation import (
    MemoryUse,
    ModelShape,
    SimulatedStep,
    advice,
    memory_use,
    simulate_step,
    simulated_timeline,
)
from relibra.simulation.limits import overlap_ratios, sustained_overlap_ratios
from relibra.simulation.units import seconds_in_words
from relibra.timeline import Timeline

MOE_TERMS = ("compute", "exchange", "gates", "copies", "relocation")
"""Parts of a simulated step that belong to its expert layers."""

WORTH_SAYING = 0.01
"""A relocation below this share of a duration is not told apart."""


class SimulatedSides(NamedTuple):
    """Both sides as simulated on a cluster: seconds, and memory of the second."""

    before: SimulatedStep
    after: SimulatedStep
    memory: MemoryUse


def simulate_sides(
    before: Side, after: Side, cluster: Cluster, model: ModelShape, distinct: Mapping[str, ndarray] | None = None
) -> SimulatedSides:
    """Simulate both sides in one pipeline stage and one optimizer step, copies overlapped.

    model      with the layers, experts and choices per token that were routed
    distinct   tokens that travel, of each side by name, as in `Question`; None: bounds from pairs
    raises     as `simulate_step`
    """

    def simulated(side: Side) -> SimulatedStep:
        rows_MLRR = None if distinct is None else distinct[side.name]
        return simulate_step(side.plan, side.demand, cluster, model, distinct_MLRR=rows_MLRR)

    return SimulatedSides(
        before=simulated(before),
        after=simulated(after),
        memory=memory_use(after.plan, after.demand, cluster, model),
    )


def limits_section(
    found: SimulatedSides,
    before: Side,
    after: Side,
    cluster: Cluster,
    model: ModelShape,
    *,
    counted: bool,
    remedy: str = "",
) -> str:
    """Show the overlap ratio, what limits the step in words, and its seconds part by part.

    counted   rows of exchanges were counted token by token
    remedy    how to have them counted, as in `Question`
    """
    sentences = advice(found.after, cluster, model, found.memory)
    items = [
        *_overlap_items(cluster, model),
        seconds_item(
            named("Step, simulated", before, after),
            before.name,
            (found.before.seconds, found.after.seconds),
            (found.before.terms["relocation"], found.after.terms["relocation"]),
        ),
        (
            named("Flops used", before, after),
            percent(found.after.model_flops_utilisation),
            f"of the peak, simulated; {before.name} {percent(found.before.model_flops_utilisation)}",
        ),
    ]
    part = f" ({model.part_in_words})" if model.part_in_words else ""
    bars, longest = _bars(found)
    return section(
        "limits",
        f"What limits {model.name} on {cluster.name} first",
        cards(items),
        "" if before.name == STATIC else paragraph(f"With {after.words}:"),
        bullets(sentences),
        bar_table(
            "Parts of the step, simulated; bars from 0",
            ("part", before.name, after.name, "share"),
            bars,
            start=0.0,
            end=longest,
        ),
        paragraph(
            f"Simulated: {cluster.num_ranks} ranks of {cluster.name} ({cluster.label}: {cluster.source}); sizes of "
            f"{model.name} with {model.moe_layers} expert layers{part}, {model.top_k} of {model.experts} experts per "
            "token; "
            "one pipeline stage, one optimizer step, copies beside other work. Parts add up to the step. "
            + " ".join(
                [
                    _rows_in_words(after, counted=counted, remedy=remedy),
                    _predicted(found, after, cluster, model),
                    *found.after.notes,
                ]
            ),
            "how",
        ),
    )


def _bars(found: SimulatedSides) -> tuple[list[Bar], float]:
    """Return the parts of the second side's step, the longest first, and the longest of both sides."""
    names = [name for name in found.after.terms if found.before.terms[name] > 0 or found.after.terms[name] > 0]
    longest = max((max(found.before.terms[n], found.after.terms[n]) for n in names), default=0.0) or 1.0
    bars = [
        Bar(
            name=name,
            low=0.0,
            high=found.after.terms[name],
            kind="whole",
            cells=(
                seconds_in_words(found.before.terms[name]),
                seconds_in_words(found.after.terms[name]),
                percent(found.after.terms[name] / (found.after.seconds or 1.0)),
            ),
        )
        for name in sorted(names, key=lambda name: -found.after.terms[name])
    ]
    return bars, longest


def moe_seconds(step: SimulatedStep) -> float:
    """Return the seconds of experts, their rows and copies, and relocation: those parts of a step that a plan moves."""
    return sum(step.terms[name] for name in MOE_TERMS)


def seconds_item(
    label: str, beside: str, seconds: tuple[float, float], relocation: tuple[float, float]
) -> tuple[str, str, str]:
    """Return the card of a duration: the second side's, with the first beside it, and both without relocation.

    Experts move once and may stay for many steps, so a step that pays for it says nothing about the next.
    """
    first, second = (total - moved for total, moved in zip(seconds, relocation, strict=True))
    before = f"{beside} {seconds_in_words(seconds[0])}"
    if _matters(seconds[0], relocation[0]):
        before += f" ({seconds_in_words(first)} without relocation)"
    note = f"{before}, {_ratio(seconds[0], seconds[1])} as fast"
    if _matters(seconds[1], relocation[1]):
        note += f"; {seconds_in_words(second)} without relocation, which is paid once: {_ratio(first, second)}"
    elif _matters(seconds[0], relocation[0]):
        note += f"; {_ratio(first, second)} without it, as it is paid once"
    return label, seconds_in_words(seconds[1]), note


def _ratio(before: float, after: float) -> str:
    return f"{before / after if after else 1.0:.2f}×"


def _matters(seconds: float, relocation: float) -> bool:
    return relocation > WORTH_SAYING * seconds


def _overlap_items(cluster: Cluster, model: ModelShape) -> list[tuple[str, str, str]]:
    sustained = sustained_overlap_ratios(cluster, model.expert)
    return [
        (
            f"Overlap ratio {where}",
            f"{ratio:.2f}",
            "seconds of experts / seconds on the link of a token-slot, at peak flops; "
            f"{sustained[where]:.2f} at sustained flops",
        )
        for where, ratio in overlap_ratios(cluster, model.expert).items()
    ]


def _rows_in_words(after: Side, *, counted: bool, remedy: str) -> str:
    if counted:
        return "Rows between ranks are counted token by token."
    told = f"; {remedy}." if remedy else "."
    if after.demand.pairs_LEE is None:
        return f"Rows between ranks: one for every choice, an upper bound, as nobody counted tokens{told}"
    return f"Rows between ranks are a lower bound from pairs of experts{told}"


def _predicted(found: SimulatedSides, after: Side, cluster: Cluster, model: ModelShape) -> str:
    """Say why the planner told other seconds of the expert layers, where it did."""
    simulated = seconds_in_words(moe_seconds(found.after))
    planner = seconds_in_words(predict_planned(after.plan, after.demand, cluster, model.expert).total)
    if simulated == planner:
        return ""
    rows = "a row for every choice" if after.demand.pairs_LEE is None else "a lower bound of rows from pairs of experts"
    return (
        f"The expert layers with {after.words} take {simulated} here and {planner} by the planner’s own model, which "
        f"takes {rows}, no gate weights, and hides copies under projections only."
    )


def simulated_timelines(
    found: SimulatedSides,
    before: Side,
    after: Side,
    cluster: Cluster,
    model: ModelShape,
    micro_batch: int,
    distinct: Mapping[str, ndarray] | None = None,
) -> tuple[list[tuple[str, Timeline]], str]:
    """Return both sides' events of one micro-batch on some ranks, and which ones that are.

    distinct   as for `simulate_sides`
    """
    one_group = before.demand.group_M is None
    busy_R = before.rank_load_MLR[micro_batch].sum(axis=0) if one_group else found.before.token_slots_R
    ranks = chosen_ranks(busy_R.tolist())
    timelines = [
        (
            side.name,
            simulated_timeline(
                side.plan,
                side.demand,
                cluster,
                model,
                ranks=ranks,
                micro_batches=[micro_batch],
                distinct_MLRR=None if distinct is None else distinct[side.name],
            ),
        )
        for side in (before, after)
    ]
    listed = ", ".join(map(str, ranks))
    return timelines, (
        f"Micro-batch {micro_batch}, which gains most, on ranks {listed}: its busiest and its idlest with "
        f"{before.words} and some between."
    )
