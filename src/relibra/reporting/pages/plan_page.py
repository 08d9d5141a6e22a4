"""`write_plan_page`: a self-contained HTML page that compares a plan with the static layout or with another plan.

Pictures are HTML, SVG and canvases drawn by two small scripts, without plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import relibra
from relibra.planning.analysis.levers import lever_bounds, lever_gaps
from relibra.planning.plan import StepPlan
from relibra.printable import plural
from relibra.reporting.data.compared_plans import ComparedPlan, ComparedStep
from relibra.reporting.data.comparison import ComparisonRow
from relibra.reporting.data.number_format import count, exact_percent
from relibra.reporting.data.step_simulation import StepSimulation, simulate_plans, simulate_timelines
from relibra.reporting.html.glossary import LOAD_WORDS, PLAN_WORDS, glossary
from relibra.reporting.html.html import cards, paragraph, section
from relibra.reporting.html.html_bars import waterfall
from relibra.reporting.html.html_page import check_output, html_page, write_page
from relibra.reporting.pages.balancers_section import balancers_headline, balancers_section
from relibra.reporting.pages.failure_section import failure_section
from relibra.reporting.pages.ledger_section import ledger_section
from relibra.reporting.pages.limits_section import limits_section, seconds_card
from relibra.reporting.pages.load_section import load_section
from relibra.reporting.pages.timeline_section import timeline_section
from relibra.timeline import Timeline

SCRIPTS = ("loads.js", "timeline.js")


def write_plan_page(
    path: Path | str,
    step: ComparedStep,
    *,
    balancers: Sequence[ComparisonRow] = (),
    timelines: Sequence[tuple[str, Timeline]] = (),
    remedy: str = "",
) -> Path:
    """Write the page of a plan, completely or not at all; return its path.

    balancers   figures of balancers on the same step: the page compares them first, then shows the plan of one
    timelines   (name, timeline) of the step, measured or simulated elsewhere
    remedy      advice shown where rows are bounds: how to count them token by token; "" for none
    raises      ConfigError when the page cannot be written there
    """
    output = Path(path)
    check_output(output)
    return write_page(output, render_plan_page(step, datetime.now(UTC), balancers, timelines, remedy))


def render_plan_page(
    step: ComparedStep,
    made: datetime,
    balancers: Sequence[ComparisonRow] = (),
    timelines: Sequence[tuple[str, Timeline]] = (),
    remedy: str = "",
) -> str:
    """Return the page as text; the same values give the same bytes."""
    before, after = step.plans
    plan = after.plan
    M, L, R, _ = plan.replica_MLRB.shape
    planned = [one for one in step.plans if not one.is_static]
    facts = [
        f"relibra {relibra.__version__}, {made:%Y-%m-%d %H:%M} UTC",
        *(f"plan {one.plan.digest()[:16]} by {one.plan.balancer}" for one in planned),
        f"{plural(M, 'micro-batch')}, {plural(L, 'layer')}, {plural(plan.num_experts, 'expert')}",
        f"{plural(R, 'rank')} on {plural(plan.num_nodes, 'node')}, {plural(plan.slots, 'spare slot')} per rank",
    ]
    title = f"{plan.num_experts} experts on {R} ranks" + f": {before.name} and {after.name}" * (len(planned) > 1)
    kind, verdict, pieces = "plan of a step", step_headline(step), step_sections(step, timelines, remedy)
    if balancers:
        key_figures, *others = pieces
        detail = section("plan", f"In detail: {after.name}", paragraph(verdict), key_figures)
        kind, verdict = "comparison of balancers", balancers_headline(balancers)
        pieces = [balancers_section(balancers), detail, *others]
    body = "\n".join([*pieces, glossary(LOAD_WORDS, PLAN_WORDS)])
    return html_page(title, kind, verdict, body, paragraph(" · ".join(facts)), scripts=SCRIPTS)


def step_sections(step: ComparedStep, timelines: Sequence[tuple[str, Timeline]] = (), remedy: str = "") -> list[str]:
    """Return the cards of a compared step, then its sections: first what was counted, then what is simulated."""
    found = simulate_plans(step) if step.after.demand.load_MLE.any() else None
    pieces = [
        _cards(step, found),
        *(_levers_section(one, number) for number, one in enumerate(step.plans) if not one.is_static),
        load_section(step),
        failure_section(step),
        ledger_section(step, found),
        limits_section(step, found, remedy=remedy) if found else "",
        _timelines(step, found, timelines),
    ]
    return [piece for piece in pieces if piece]


def _timelines(step: ComparedStep, found: StepSimulation | None, given: Sequence[tuple[str, Timeline]]) -> str:
    about = ""
    simulated: list[tuple[str, Timeline]] = []
    micro_batch, layer = step.most_improved()
    if found is not None:
        simulated, ranks = simulate_timelines(step, micro_batch)
        about = (
            f"Micro-batch {micro_batch}, the most improved one, on ranks {', '.join(map(str, ranks))}: the busiest and "
            f"the least busy in the first timeline and some between. "
        )
    about += (
        "Three lines per rank: work; rows of tokens sent to experts (dispatch) and back (combine); replicas pushed "
        "to other ranks, their gradients returned, and waits for both. All share one scale; a layer starts at the "
        "left in each. Dispatch and combine begin when a rank is ready and include its wait for the last rank. Time "
        "counts from the first event shown."
    )
    first_layer = int(step.after.plan.layer_ids[layer])
    return timeline_section([*simulated, *given], about, first_layer=first_layer)


def step_headline(step: ComparedStep) -> str:
    """Return skew, and share of the expert time that a rank waits for the busiest on average, of both plans."""
    return " · ".join(
        f"{one.name}: skew {one.skew:.3f}, {exact_percent(1 - 1 / one.skew)} of the expert time spent waiting"
        for one in step.plans
    )


def _cards(step: ComparedStep, found: StepSimulation | None) -> str:
    """Show the key figures of the second plan; of two plans, both by name."""
    before, after = step.plans
    bounds = [f"bound {one.bound:.3f}, gap {exact_percent(one.skew / one.bound - 1)}" for one in step.plans]
    if before.is_static:
        items = [
            ("Skew, static layout", f"{before.skew:.3f}", "busiest / mean load of ranks; 1 is even"),
            ("Skew, planned", f"{after.skew:.3f}", bounds[1]),
        ]
    else:
        items = [(f"Skew, {one.name}", f"{one.skew:.3f}", bound) for one, bound in zip(step.plans, bounds, strict=True)]
    for (label, value, note), (_, other, _) in zip(_change_cards(after.plan), _change_cards(before.plan), strict=True):
        items.append((step.label(label), value, note if before.is_static else f"{note}; {before.name} {other}"))
    if found is not None:
        label = step.label("Expert layers, simulated")
        items.append(seconds_card(label, before.name, found.moe_seconds, found.term("relocation")))
    return cards(items)


def _change_cards(plan: StepPlan) -> list[tuple[str, str, str]]:
    """Return label, figure and note of the replicas and moves of a plan."""
    M, L, _, _ = plan.replica_MLRB.shape
    away = plan.num_cross_node_copies
    per_layer = f"{plan.num_copies / max(1, M * L):.1f} per micro-batch and layer"
    return [
        ("Replicas", count(plan.num_copies), f"temporary copies of experts, {per_layer}"),
        ("Replicas across nodes", count(away), "their homes are on another node" if away else "none"),
        ("Experts moved", count(plan.num_moved), f"of {count(plan.home_LE.size)}, to another rank before the step"),
    ]


def _levers_section(one: ComparedPlan, number: int) -> str:
    return section(
        f"levers-{number}",
        f"Skew after each part of {one.name}",
        paragraph(
            "The parts of a plan (levers) applied one after the other: schedule (micro-batch and rank of each sample), "
            "homes (the rank that owns each expert), replicas on ranks of the same node, replicas on other nodes "
            "(cross-node copies). A lever may reduce the skew little by itself and let others reduce it more: "
            "reachable is the lowest skew that replicas could reach with the homes and the schedule so far.",
            "how",
        ),
        waterfall(lever_gaps(one.plan, one.given), lever_bounds(one.plan, one.given)),
    )
