"""The section that comes first: what limits this model on this cluster, simulated before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpy import ndarray

from relibra.cluster import Cluster
from relibra.reporting.bars import Bar, bar_table
from relibra.reporting.elements import bullets, cards, paragraph, section
from relibra.reporting.sentences import percent
from relibra.reporting.sides import Side
from relibra.reporting.timeline_section import chosen_ranks
from relibra.simulation import (
    MemoryUse,
    ModelShape,
    SimulatedStep,
    advice,
    memory_use,
    simulate_step,
    simulated_timeline,
)
from relibra.simulation.limits import overlap_ratios
from relibra.simulation.quantities import seconds_in_words
from relibra.timeline import Timeline


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


def limits_section(found: SimulatedSides, before: Side, after: Side, cluster: Cluster, model: ModelShape) -> str:
    """Show the overlap ratio, what limits the step in words, and its seconds part by part."""
    sentences = advice(found.after, cluster, model, found.memory)
    faster = found.before.seconds / found.after.seconds if found.after.seconds else 1.0
    items = [
        *(
            (f"Overlap ratio {where}", f"{ratio:.2f}", "work / travel of a token-slot; above 1 work can hide it")
            for where, ratio in overlap_ratios(cluster, model.expert).items()
        ),
        (
            "Step, simulated",
            seconds_in_words(found.after.seconds),
            f"{before.name} {seconds_in_words(found.before.seconds)}, {faster:.2f}×",
        ),
        (
            "Flops used",
            percent(found.after.model_flops_utilisation),
            f"of the peak, simulated; {before.name} {percent(found.before.model_flops_utilisation)}",
        ),
    ]
    names = [name for name in found.after.terms if found.before.terms[name] > 0 or found.after.terms[name] > 0]
    part = f" ({model.part_in_words})" if model.part_in_words else ""
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
    return section(
        "limits",
        f"What limits {model.name} on {cluster.name} first",
        cards(items),
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
            + " ".join(found.after.notes),
            "how",
        ),
    )


def simulated_timelines(
    found: SimulatedSides, before: Side, after: Side, cluster: Cluster, model: ModelShape, micro_batch: int
) -> tuple[list[tuple[str, Timeline]], str]:
    """Return both sides' events of one micro-batch on some ranks, and which ones that are."""
    one_group = before.demand.group_M is None
    busy_R = before.rank_load_MLR[micro_batch].sum(axis=0) if one_group else found.before.token_slots_R
    ranks = chosen_ranks(busy_R.tolist())
    timelines = [
        (
            side.name,
            simulated_timeline(side.plan, side.demand, cluster, model, ranks=ranks, micro_batches=[micro_batch]),
        )
        for side in (before, after)
    ]
    listed = ", ".join(map(str, ranks))
    return timelines, (
        f"Micro-batch {micro_batch}, which gains most, on ranks {listed}: its busiest and its idlest with "
        f"{before.words} and some between."
    )
