"""The sections of the report about recorded routes, each a function from values to HTML, in the order of the page."""

from __future__ import annotations

import numpy as np

from relibra.printable import plural
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import count, percent, times
from relibra.reporting.data.summary import Summary
from relibra.reporting.html import route_figures
from relibra.reporting.html.html import cards, paragraph, plot, section, selector, table
from relibra.routing.statistics import rank_skew, skew

MAX_GROUPS = 12
ALIKE, DIFFERENT = 0.98, 0.90
"""Cosines between micro-batch and step: above the first one plan per step fits all, below the second it fits few."""

SKEW_COLUMNS = (
    ("skew_mean", "mean"),
    ("skew_median", "median"),
    ("skew_p95", "p95"),
    ("skew_max", "max"),
    ("skew_weighted", "weighted"),
)
"""Figures of `RankSkew`, named and ordered as `relibra trace stats` does."""


def summary_cards(summary: Summary | None, metrics: Metrics) -> str:
    """Show the key figures; without a summary those of the run alone."""
    items = [*_run_figures(metrics), *(_load_figures(summary) if summary else [])]
    return cards(items[:8]) if items else ""


def _run_figures(metrics: Metrics) -> list[tuple[str, str, str]]:
    items = []
    if (reward := metrics.last("reward")) is not None:
        items.append(("Reward", f"{reward:.3f}", "mean of the last step"))
    if (evaluation := metrics.last("evaluation", "reward")) is not None:
        items.append(("Evaluation", f"{evaluation:.3f}", "mean reward on held-out prompts"))
    if (length := metrics.last("response_length")) is not None:
        items.append(("Response length", count(round(length)), "tokens, mean of the last step"))
    if (planned := metrics.last("planned_skew")) is not None:
        items.append(("Rank skew, planned", times(planned), "last step, in training: busiest / mean load"))
    return items


def _load_figures(summary: Summary) -> list[tuple[str, str, str]]:
    L, E = summary.load_LE.shape
    items = [
        ("Model", f"{L} × {E}", f"layers × experts, {plural(summary.top_k, 'choice')} per token"),
        (
            "Routed tokens",
            count(summary.tokens),
            f"{plural(summary.samples, 'sample')}, {plural(len(summary.steps), 'step')}",
        ),
    ]
    if summary.headline:
        view, found = summary.headline
        items += [
            (f"Rank skew, {view.ranks} ranks", times(found.skew_weighted), "of the recorded routes without a plan"),
            (f"Waiting, {view.ranks} ranks", percent(found.idle_share), "of the expert time, without a plan"),
        ]
    hottest = summary.hottest[0]
    return [
        *items,
        ("Busiest expert", times(hottest.times_mean), f"the mean load: layer {hottest.layer}, expert {hottest.expert}"),
        ("Micro-batch to step", f"{summary.stability.cosine:.3f}", "cosine of expert loads; 1 = alike"),
    ]


def expert_load(summary: Summary) -> str:
    """Show the load of every expert in every layer."""
    hottest = summary.hottest[0]
    options = [label for label, _ in route_figures.heatmap_views(summary)]
    return section(
        "load",
        "Recorded load of every expert",
        paragraph(
            f"On average over layers the busiest expert gets {times(summary.expert_skew)} the mean load (expert "
            f"skew). In the median layer the standard deviation over experts is "
            f"{percent(summary.coefficient_of_variation)} of the mean."
        ),
        paragraph(
            "Colour: token-slots of the expert (one for each token that chose it) / mean over the experts of its "
            "layer. 1 is an equal share. The scale ends at the 99.5th percentile of all steps together.",
            "how",
        ),
        selector("Show", "load-plot", options),
        plot(
            "load-plot",
            route_figures.expert_heatmap(summary),
            f"Heatmap of {len(summary.layer_ids)} layers by {summary.num_experts} experts. The busiest is expert "
            f"{hottest.expert} of layer {hottest.layer} with {times(hottest.times_mean)} its layer’s mean load.",
        ),
    )


def micro_batch_skew(summary: Summary) -> str:
    """Show rank skew over micro-batches; "" when no rank count is possible."""
    if not summary.possible:
        return ""
    shown = min(len(summary.step_M), route_figures.MAX_POINTS)
    thinned = f" {count(shown)} of {count(len(summary.step_M))} micro-batches are drawn, evenly chosen." * (
        shown < len(summary.step_M)
    )
    words = "; ".join(
        f"{route_figures.ranks_in_words(view)} mean {times(it.skew_mean)}" for view, it in summary.possible
    )
    return section(
        "micro-batches",
        "Rank skew of each micro-batch without a plan",
        paragraph(
            f"Rank skew = token-slots of the busiest rank / mean over ranks, in the static layout (with E experts on R "
            f"ranks, the first E/R experts on rank 0, and so on). Line: mean over layers. Band: from the least to the "
            f"most skewed layer. A micro-batch is {plural(summary.micro_batch_tokens, 'consecutive token')} of a "
            f"step; the remainder of a step is a smaller one.{thinned}",
            "how",
        ),
        plot("skew-plot", route_figures.skew_by_micro_batch(summary), f"Rank skew over micro-batches: {words}."),
    )


def rank_sizes(summary: Summary) -> str:
    """Show the rank skew of the same routes on other numbers of ranks."""
    rows = [
        [
            route_figures.ranks_in_words(view),
            *(f"{getattr(found, name):.2f}" for name, _ in SKEW_COLUMNS),
            percent(found.idle_share),
        ]
        for view, found in summary.possible
    ]
    words = ". ".join(f"{row[0]}: mean {row[1]}, median {row[2]}, 95th percentile {row[3]}" for row in rows)
    impossible = [str(view.ranks) for view in summary.rank_views if view.skew is None]
    pieces = [
        plot("sizes-plot", route_figures.skew_by_ranks(summary.possible), f"Rank skew by number of ranks. {words}."),
        table(
            "Rank skew by number of ranks",
            ("", *(title for _, title in SKEW_COLUMNS), "idle"),
            rows,
            text_columns=(0,),
        ),
    ]
    return section(
        "sizes",
        f"The same routes on {_listed([view.ranks for view in summary.rank_views])} ranks",
        paragraph(
            "With more ranks each has fewer experts, so busy and less busy experts average out less. Static layout; "
            "mean to maximum are over all pairs of micro-batch and layer. Weighted: the sum of the busiest ranks’ "
            "loads / the sum of the mean loads, so that large micro-batches count more. Idle: share of the expert time "
            "that ranks wait for the busiest, 1 − 1 / weighted.",
            "how",
        ),
        *(pieces if rows else []),
        paragraph(f"Not possible with {plural(summary.num_experts, 'expert')}: {', '.join(impossible)} ranks.", "how")
        if impossible
        else "",
    )


def hottest_experts(summary: Summary) -> str:
    """Show the experts with the largest shares of their layer."""
    rows = [
        [str(hot.layer), str(hot.expert), f"{100 * hot.share:.1f}\u202f%", times(hot.times_mean)]
        for hot in summary.hottest
    ]
    return section(
        "hottest",
        "Experts with the largest loads",
        paragraph(
            f"Share: token-slots of the expert / token-slots of its layer, all steps together. An equal share would be "
            f"{100 / summary.num_experts:.3g}\u202f%.",
            "how",
        ),
        table(
            "Experts with the largest loads",
            ("layer", "expert", "share of layer", "times the mean"),
            rows,
            text_columns=(),
        ),
    )


def groups(summary: Summary) -> str:
    """Show the skew of each named group of samples by itself; "" without names."""
    if not summary.groups or summary.headline is None:
        return ""
    view, _ = summary.headline
    rows = [
        [
            group.name,
            count(group.samples),
            count(group.tokens),
            f"{np.median(skew(group.load_LE)):.2f}",
            f"{rank_skew(group.load_LE, view.ranks).mean():.2f}",
        ]
        for group in summary.groups[:MAX_GROUPS]
    ]
    more = len(summary.groups) - len(rows)
    return section(
        "groups",
        "Groups of samples",
        paragraph(
            f"The whole load of each group by itself. Expert skew: median over layers of busiest / mean expert. Rank "
            f"skew: mean over layers on {view.ranks} ranks, static layout."
            + (f" The {plural(more, 'group')} with fewest tokens are left out." if more else ""),
            "how",
        ),
        table("Groups of samples", ("group", "samples", "tokens", "expert skew", "rank skew"), rows, text_columns=(0,)),
    )


def stability(summary: Summary) -> str:
    """Show how alike micro-batches are, and whether one plan per step would do."""
    value = summary.stability
    rows = [["cosine of a micro-batch and its step, mean", f"{value.cosine:.3f}"]]
    if value.micro_batches > 1:
        rows.append(["the same by chance alone", f"{value.chance:.3f}"])
        rows.append(["fluctuation of an expert’s share", percent(value.fluctuation)])
    if value.step_to_step is not None:
        rows.append(["cosine of a step and the step before it, mean", f"{value.step_to_step:.3f}"])
    return section(
        "stability",
        "One plan per step, or one per micro-batch?",
        table("Stability", ("", "figure"), rows, text_columns=(0,)),
        paragraph(
            "Cosine between the expert loads of a micro-batch and of its whole step, per layer: 1 is the same mix of "
            f"experts. As a rule of thumb, from {ALIKE} on one plan fits a whole step, below {DIFFERENT} it fits few "
            "of its micro-batches. By chance alone: micro-batches of this size, drawn at random from the step; where "
            "the cosine is close to that, few tokens differ by chance only. Fluctuation: standard deviation over "
            "micro-batches / mean, weighted by load. Between steps: how well loads of the last step predict this one.",
            "how",
        ),
        plot("stability-plot", route_figures.cosine_by_layer(value, summary.layer_ids), "Cosine per layer.")
        if value.micro_batches > 1
        else "",
    )


def _listed(numbers: list[int]) -> str:
    """Write `2, 8 and 32`."""
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
