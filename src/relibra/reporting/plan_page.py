"""`write_plan_page`: one self-contained HTML page about a plan, and about the balancers it was compared with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import relibra
from relibra.files import write_text
from relibra.planning.comparison import LEVERS_IN_WORDS, ComparisonRow, scopes_in_words
from relibra.planning.levers import lever_bounds, lever_gaps
from relibra.planning.loads import home_rank_load
from relibra.planning.plan import StepPlan, cross_node_copies
from relibra.reporting import plan_pictures as pictures
from relibra.reporting.elements import cards, definitions, paragraph, plot, section, selector, table
from relibra.reporting.page import html_page, place_problems, refuse_folder
from relibra.reporting.pictures import plotly_figures
from relibra.reporting.sentences import count, percent, plural
from relibra.routing.demand import Demand
from relibra.routing.statistics import contiguous_homes

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
)


def write_plan_page(
    path: Path | str, plan: StepPlan, demand: Demand, rows: Sequence[ComparisonRow] | None = None
) -> Path:
    """Write the page of a plan, whole or not at all, and return where it is.

    demand    with the schedule that the balancer was given
    rows      balancers on the same step, to be shown beside the plan
    raises    ConfigError without plotly, or when the page cannot be written there
    """
    plotly_figures()
    output = Path(path)
    with place_problems(output):
        refuse_folder(output)
    page = render_plan_page(plan, demand, rows or (), datetime.now(UTC))
    with place_problems(output):
        write_text(output, page)
    return output


def render_plan_page(plan: StepPlan, demand: Demand, rows: Sequence[ComparisonRow], made: datetime) -> str:
    """Return the page as text; the same values give the same bytes."""
    levers = lever_gaps(plan, demand)
    pieces = [_cards(plan, levers), _levers(levers, lever_bounds(plan, demand)), _heatmaps(plan, demand)]
    if rows:
        pieces.append(_balancers(rows))
    pieces.append(section("glossary", "Words", definitions(GLOSSARY)))
    M, L, R, _ = plan.replica_MLRB.shape
    facts = [
        f"relibra {relibra.__version__}, {made:%Y-%m-%d %H:%M} UTC",
        f"plan {plan.digest()[:16]} by {plan.balancer}",
        f"{plural(M, 'micro-batch')}, {plural(L, 'layer')}, {plural(plan.num_experts, 'expert')}",
        f"{plural(R, 'rank')} on {plural(plan.num_nodes, 'node')}, {plural(plan.slots, 'spare slot')} per rank",
    ]
    title = f"{plan.num_experts} experts on {R} ranks"
    return html_page(title, "plan of a step", _verdict(levers), "\n".join(pieces), paragraph(" · ".join(facts)))


def _verdict(levers: Sequence[tuple[str, float]]) -> str:
    values = dict(levers)
    before, after, bound = values["static"], values["cross-node copies"], values["bound"]
    near = "exactly the bound" if after <= bound else f"{percent(after / bound - 1)} above the bound"
    return (
        f"In the static layout the busiest ranks compute {before:.2f}× the mean; with this plan {after:.3f}×, {near}. "
        f"Ranks would wait {percent(1 - 1 / before)} of the expert time without it, {percent(1 - 1 / after)} with it."
    )


def _cards(plan: StepPlan, levers: Sequence[tuple[str, float]]) -> str:
    values = dict(levers)
    M, L, _, _ = plan.replica_MLRB.shape
    away = cross_node_copies(plan)
    items = [
        ("Skew before", f"{values['static']:.3f}", "static layout, token objective"),
        ("Skew planned", f"{values['cross-node copies']:.3f}", f"bound {values['bound']:.3f}"),
        ("Copies", count(plan.num_copies), f"{plan.num_copies / max(1, M * L):.1f} per micro-batch and layer"),
        ("Copies across nodes", count(away), "fed from a host pool" if away else "none"),
        ("Experts moved", count(plan.num_moved), f"of {count(plan.home_LE.size)}, before the step"),
    ]
    if "total" in plan.predicted:
        items.append(("Step", f"{plan.predicted['total']:.3g} s", "model of the MoE layers, not a measurement"))
    return cards(items)


def _levers(levers: Sequence[tuple[str, float]], bounds: Sequence[tuple[str, float]]) -> str:
    words = "; ".join(f"{name} {value:.3f}" for name, value in levers)
    cells = [
        [name, f"{value:.3f}", f"{reachable:.3f}"]
        for (name, value), (_, reachable) in zip(levers, bounds, strict=True)
        if name != "bound"
    ]
    return section(
        "levers",
        "What each lever bought",
        paragraph(
            "Skew (token objective) as the levers are pulled one after the other. A lever that makes others possible "
            "may buy little by itself: reachable is the lowest skew that the plan’s slots and scope of copies allow "
            "with the homes and the schedule so far.",
            "how",
        ),
        plot("levers-plot", pictures.lever_waterfall(levers), f"Skew after each lever: {words}."),
        table("What each lever bought", ("lever", "skew", "reachable"), cells, text_columns=(0,)),
    )


def _heatmaps(plan: StepPlan, demand: Demand) -> str:
    scheduled = plan.scheduled(demand)
    static_LE = np.tile(contiguous_homes(plan.num_experts, plan.num_ranks), (len(plan.layer_ids), 1))
    before_MLR = home_rank_load(demand.load_MLE, static_LE, plan.num_ranks)
    after_MLR = plan.rank_load(scheduled)
    if not before_MLR.sum() or not after_MLR.size:
        return ""
    layers = pictures.heatmap_layers(before_MLR, after_MLR)
    names = [f"layer {plan.layer_ids[layer]}" + " (gains most)" * (i == 0) for i, layer in enumerate(layers)]
    return section(
        "ranks",
        "Load of every rank",
        paragraph(
            "Colour: token-slots of the rank / mean over ranks, in each micro-batch. 1 is an equal share: after "
            "planning, all cells should have one colour. Both share a scale, which ends at the 99th percentile "
            "of the busiest ranks before.",
            "how",
        ),
        selector("Show", "ranks-plot", names),
        plot(
            "ranks-plot",
            pictures.rank_heatmaps(before_MLR, after_MLR, plan.layer_ids),
            f"Two heatmaps of {plan.num_ranks} ranks by {len(before_MLR)} micro-batches, before and after planning.",
        ),
    )


def _balancers(rows: Sequence[ComparisonRow]) -> str:
    cells = [
        [
            row.balancer.replace("+", "\u200b+"),  # a long set of levers may break before a lever, and nowhere else
            row.sees,
            f"{row.skew:.3f}",
            f"{row.gap:.1%}",
            f"{row.copies_per_micro_batch_layer:.1f}",
            f"{(row.moved_bytes or 0) / 1e9:.1f}",
            count(row.cross_node_token_slots or 0),
            f"{row.plan_seconds:.2f}",
            f"{row.predicted_seconds:.3g}",
        ]
        for row in rows
        if row.skew is not None
    ]
    header = ("balancer", "sees", "skew", "gap", "copies", "moved GB", "across nodes", "plan s", "step s (model)")
    failed = [f"{row.balancer}: {row.message}" for row in rows if row.message]
    return section(
        "balancers",
        "Balancers side by side",
        paragraph(
            "Skew: token objective. Sees: what the balancer may know of the step. Copies: per micro-batch and layer. "
            "Across nodes: token-slots computed on another node than they come from. Plan s: measured on the machine "
            "that planned. Step s: a model of the MoE layers, not a measurement.",
            "how",
        ),
        paragraph(
            f"{LEVERS_IN_WORDS}. Bounds compare only between rows whose copies may sit alike: {scopes_in_words(rows)}.",
            "how",
        ),
        plot("balancers-plot", pictures.balancer_skews(rows), "Skew of each balancer; the table has the figures."),
        table("Balancers side by side", header, cells, text_columns=(0, 1)),
        *(paragraph(text, "notice") for text in failed),
    )
