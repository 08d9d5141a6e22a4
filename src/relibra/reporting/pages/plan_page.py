"""`write_plan_page`: one self-contained HTML page about a plan, and about what it is compared with.

Beside the plan stands the static layout or another plan. Pictures are HTML, SVG and canvases drawn by two small
scripts; nothing of it needs plotly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from numpy import ndarray

import relibra
from relibra.cluster import Cluster
from relibra.files import write_text
from relibra.planning.analysis.comparison import ComparisonRow
from relibra.planning.analysis.levers import lever_bounds, lever_gaps
from relibra.planning.plan import cross_node_copies
from relibra.reporting.data.compared_plans import STATIC, Side, most_gaining, named, refuse_other_sizes
from relibra.reporting.data.sentences import count, exact_percent, plural
from relibra.reporting.html.html import cards, definitions, paragraph, section
from relibra.reporting.html.html_bars import waterfall
from relibra.reporting.html.html_page import html_page, place_problems, refuse_folder
from relibra.reporting.pages.balancers_section import balancers_section
from relibra.reporting.pages.ledger_section import cover_section, ledger_section, ledgers
from relibra.reporting.pages.limits_section import (
    SimulatedSides,
    limits_section,
    moe_seconds,
    seconds_item,
    simulate_sides,
    simulated_timelines,
)
from relibra.reporting.pages.load_section import load_section
from relibra.reporting.pages.timeline_section import timeline_section
from relibra.simulation import ModelShape
from relibra.timeline import Timeline

SCRIPTS = ("loads.js", "timeline.js")

GLOSSARY = (
    (
        "Skew",
        "The token objective: the token-slots of the busiest rank, summed over all micro-batches and layers, / the "
        "same sum of the mean rank. 1 is even; at 2 the ranks wait half of the expert time.",
    ),
    (
        "Bound",
        "The lowest skew that any choice of replicas and token split can reach with the plan’s homes, schedule, slots "
        "and scope. It follows from counting; nothing is solved for it.",
    ),
    ("Gap", "Skew / bound − 1: what the solver left on the table."),
    ("Home", "The rank that owns an expert for the whole step, with its optimizer state."),
    ("Copy", "A replica: an expert’s weights in a spare slot of another rank, for one micro-batch and layer."),
    (
        "Levers",
        "What a plan may change: which samples meet in a micro-batch and on which rank (schedule), which rank owns "
        "which expert (homes), copies inside a node (replicas), copies on other nodes.",
    ),
    ("Simulated", "Events of a step on a cluster described by figures; see docs/simulation.md. Nothing was measured."),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What a page is about, beside the plans.

    model       with the layers, experts and choices per token that were routed
    rows        balancers on the same step, to be shown beside the plan
    timelines   (name, timeline) of the step, measured or simulated elsewhere
    distinct    tokens that each source sends to each rank, [M, L, R, R] by name of the side: exact bytes
    remedy      what to do to have them counted, said where rows are bounds; "" where nothing can be done
    """

    cluster: Cluster
    model: ModelShape
    rows: Sequence[ComparisonRow] = ()
    timelines: Sequence[tuple[str, Timeline]] = ()
    distinct: Mapping[str, ndarray] | None = field(default=None)
    remedy: str = ""


def write_plan_page(path: Path | str, before: Side, after: Side, question: Question) -> Path:
    """Write the page of a plan, whole or not at all, and return where it is.

    before    what the plan is compared with: the static layout (`static_side`), or another plan
    raises    ConfigError when the page cannot be written there, or when the sides differ in size
    """
    output = Path(path)
    with place_problems(output):
        refuse_folder(output)
    page = render_plan_page(before, after, question, datetime.now(UTC))
    with place_problems(output):
        write_text(output, page)
    return output


def render_plan_page(before: Side, after: Side, question: Question, made: datetime) -> str:
    """Return the page as text; the same values give the same bytes."""
    plan = after.plan
    M, L, R, _ = plan.replica_MLRB.shape
    refuse_other_sizes(before, after)
    planned = [after] if before.name == STATIC else [before, after]
    facts = [
        f"relibra {relibra.__version__}, {made:%Y-%m-%d %H:%M} UTC",
        *(f"plan {side.plan.digest()[:16]} by {side.plan.balancer}" for side in planned),
        f"{plural(M, 'micro-batch')}, {plural(L, 'layer')}, {plural(plan.num_experts, 'expert')}",
        f"{plural(R, 'rank')} on {plural(plan.num_nodes, 'node')}, {plural(plan.slots, 'spare slot')} per rank",
    ]
    title = f"{plan.num_experts} experts on {R} ranks" + f": {before.name} and {after.name}" * (len(planned) > 1)
    step = step_sections(before, after, question)
    body = "\n".join([step.cards, step.limits, *step.others, section("glossary", "Words", definitions(GLOSSARY))])
    return html_page(
        title, "plan of a step", verdict(before, after), body, paragraph(" · ".join(facts)), scripts=SCRIPTS
    )


class StepSections(NamedTuple):
    """What a page says about two sides of a step: key figures, what limits it first, and everything else in order."""

    cards: str
    limits: str
    others: list[str]


def step_sections(before: Side, after: Side, question: Question) -> StepSections:
    """Simulate, count and draw both sides."""
    cluster, model = question.cluster, question.model
    loaded = bool(after.demand.load_MLE.any())
    found = simulate_sides(before, after, cluster, model, question.distinct) if loaded else None
    paired = after.demand.pairs_LEE is not None and before.demand.pairs_LEE is not None
    known = paired or question.distinct is not None
    byte_ledgers = ledgers(before, after, cluster, model.expert, question.distinct, known=known)
    others = [
        *(_levers(side, number) for number, side in enumerate((before, after)) if side.name != STATIC),
        load_section(before, after),
        _timelines(found, before, after, question),
        ledger_section(byte_ledgers, after.plan.layer_ids, cluster, known=known),
        cover_section(before, after),
        balancers_section(question.rows) if question.rows else "",
    ]
    limits = ""
    if found:
        counted = question.distinct is not None
        limits = limits_section(found, before, after, cluster, model, counted=counted, remedy=question.remedy)
    return StepSections(_cards(before, after, found), limits, [piece for piece in others if piece])


def _timelines(found: SimulatedSides | None, before: Side, after: Side, question: Question) -> str:
    timelines, about = [], []
    micro_batch, layer = most_gaining(before, after)
    if found is not None:
        drawn, words = simulated_timelines(
            found, before, after, question.cluster, question.model, micro_batch, question.distinct
        )
        timelines += drawn
        about.append(words)
    timelines += question.timelines
    about.append(
        "Three lines per rank: work, rows on their way, copies of experts and waits for them. All share one scale; a "
        "layer starts at the left in each. Dispatch and combine begin when a rank is ready, so they hold its wait for "
        "the last rank. Time counts from the first event shown."
    )
    return timeline_section(timelines, " ".join(about), first_layer=int(after.plan.layer_ids[layer]))


def verdict(before: Side, after: Side) -> str:
    """Say in two sentences what the second side makes of the first."""
    near = "exactly the bound" if after.skew <= after.bound else f"{_gap(after)} above the bound"
    waits = [exact_percent(1 - 1 / side.skew) for side in (before, after)]
    return (
        f"With {before.words} the busiest ranks compute {before.skew:.2f}× the mean, with {after.words} "
        f"{after.skew:.3f}×, {near}. On average a rank waits {waits[0]} of the expert time for the "
        f"busiest one with {before.words}, and {waits[1]} with {after.words}."
    )


def _gap(side: Side) -> str:
    return exact_percent(side.skew / side.bound - 1)


def _cards(before: Side, after: Side, found: SimulatedSides | None) -> str:
    """Show the key figures of the second side; of two plans, both by name."""
    two = before.name != STATIC
    bounds = [f"bound {side.bound:.3f}, gap {_gap(side)}" for side in (before, after)]
    figures = [_placed(side) for side in (before, after)]
    items = [
        (
            f"Skew, {before.name}" if two else "Skew before",
            f"{before.skew:.3f}",
            bounds[0] if two else f"{before.name}, token objective",
        ),
        (named("Skew", before, after) if two else "Skew planned", f"{after.skew:.3f}", bounds[1]),
    ]
    for (label, value, note), (_, other, _) in zip(figures[1], figures[0], strict=True):
        items.append((named(label, before, after), value, f"{note}; {before.name} {other}" if two else note))
    if found is not None:
        items.append(
            seconds_item(
                named("Expert layers, simulated", before, after),
                before.name,
                (moe_seconds(found.before), moe_seconds(found.after)),
                (found.before.terms["relocation"], found.after.terms["relocation"]),
            )
        )
    return cards(items)


def _placed(side: Side) -> list[tuple[str, str, str]]:
    """Return label, figure and note of what a plan copies and moves."""
    plan = side.plan
    M, L, _, _ = plan.replica_MLRB.shape
    away = cross_node_copies(plan)
    return [
        ("Copies", count(plan.num_copies), f"{plan.num_copies / max(1, M * L):.1f} per micro-batch and layer"),
        ("Copies across nodes", count(away), "sent by homes on another node" if away else "none"),
        ("Experts moved", count(plan.num_moved), f"of {count(plan.home_LE.size)}, before the step"),
    ]


def _levers(side: Side, number: int) -> str:
    return section(
        f"levers-{number}",
        f"What each lever bought: {side.name}",
        paragraph(
            "Skew (token objective) as the levers are pulled one after the other. A lever that makes others possible "
            "may buy little by itself: reachable is the lowest skew that the plan’s slots and scope of copies allow "
            "with the homes and the schedule so far.",
            "how",
        ),
        waterfall(lever_gaps(side.plan, side.given), lever_bounds(side.plan, side.given)),
    )
