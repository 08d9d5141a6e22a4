"""The sections of the report about routes, each a function from values to HTML, in the order of the page.

Every figure has its unit and its definition beside it.
"""

from __future__ import annotations

import numpy as np

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.sentences import (
    ALIKE,
    DIFFERENT,
    count,
    history,
    one_plan_or_many,
    percent,
    plural,
    times,
)
from relibra.reporting.data.summary import Summary
from relibra.reporting.html import route_figures
from relibra.reporting.html.html import cards, definitions, paragraph, plot, section, selector, table
from relibra.routing.statistics import rank_skew, skew

MAX_GROUPS = 12

SKEW_COLUMNS = (
    ("skew_mean", "mean"),
    ("skew_median", "median"),
    ("skew_p95", "p95"),
    ("skew_max", "max"),
    ("skew_weighted", "weighted"),
)
"""Figures of `RankSkew`, named and ordered as `relibra trace stats` does."""

GLOSSARY = (
    (
        "Expert",
        "One of several feed-forward networks in a Mixture-of-Experts layer; a router sends each token to a few.",
    ),
    (
        "Token-slot",
        "One token at one of the experts it chose. A token with 4 choices makes 4 token-slots in each layer.",
    ),
    ("Load", "Token-slots an expert, or a rank, has to compute."),
    ("Rank", "One process, usually one GPU, of the group that shares the experts of a layer (expert parallelism)."),
    (
        "Skew",
        "Largest load / mean load. 1 is even; 2 means that the busiest has twice the mean. Rank skew compares ranks, "
        "expert skew compares experts. Load-weighted rank skew is the work of the busiest ranks / the mean work, added "
        "up over all micro-batches and layers.",
    ),
    (
        "Static contiguous layout",
        "Experts stay where they are: with E experts on R ranks the first E/R live on rank 0, the "
        "next E/R on rank 1, and so on. It is what a job without balancing does.",
    ),
    (
        "Expert time",
        "The time that expert layers take. All ranks wait for the busiest before the next layer, so at a "
        "load-weighted skew s they idle 1 − 1/s of it on average. Time is taken to grow with token-slots.",
    ),
    (
        "Micro-batch",
        "The tokens that pass through the model together. Here: a run of consecutive recorded tokens; the short rest "
        "of a step is one too.",
    ),
    ("Cosine", "How alike two loads are as directions: 1 is the same mix of experts, 0 is no expert in common."),
)


def summary_cards(summary: Summary | None, metrics: Metrics) -> str:
    """Show the key figures at a glance; without a summary those of the run alone."""
    items = [*_run_figures(metrics), *(_load_figures(summary) if summary else [])]
    return cards(items[:8]) if items else ""


def _run_figures(metrics: Metrics) -> list[tuple[str, str, str]]:
    items = []
    if (reward := metrics.last("reward")) is not None:
        items.append(("Reward", f"{reward:.3f}", "mean of the last step"))
    evaluations = [value for value in metrics.nested("evaluation", "reward") if value is not None]
    if evaluations:
        items.append(("Evaluation", f"{evaluations[-1]:.3f}", "mean reward on held-out prompts"))
    if (length := metrics.last("response_length")) is not None:
        items.append(("Response length", count(round(length)), "tokens, mean of the last step"))
    if (planned := metrics.last("planned_skew")) is not None:
        items.append(("Rank skew, planned", times(planned), "last step, as it was trained"))
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
            (f"Rank skew, {view.ranks} ranks", times(found.skew_weighted), "load-weighted, static layout"),
            (f"Waiting, {view.ranks} ranks", percent(found.idle_share), "of the expert time, mean over ranks"),
        ]
    hottest = summary.hottest[0]
    return [
        *items,
        ("Hottest expert", times(hottest.times_mean), f"the mean: layer {hottest.layer}, expert {hottest.expert}"),
        ("Micro-batch to step", f"{summary.stability.cosine:.3f}", "cosine of expert loads; 1 = alike"),
    ]


def expert_load(summary: Summary) -> str:
    """Show which experts work how much."""
    hottest = summary.hottest[0]
    options = [label for label, _ in route_figures.heatmap_views(summary)]
    return section(
        "load",
        "Load of every expert",
        paragraph(
            f"On average over layers the busiest expert gets {times(summary.expert_skew)} the mean load (expert "
            f"skew). In the median layer load varies by {percent(summary.coefficient_of_variation)} of its mean "
            "(standard deviation over experts)."
        ),
        paragraph(
            "Colour: token-slots of the expert / mean over the experts of its layer. 1 is an equal share; dark experts "
            "hardly work. The scale ends at the 99.5th percentile of all steps together.",
            "how",
        ),
        selector("Show", "load-plot", options),
        plot(
            "load-plot",
            route_figures.expert_heatmap(summary),
            f"Heatmap of {len(summary.layer_ids)} layers by {summary.num_experts} experts. The hottest is expert "
            f"{hottest.expert} of layer {hottest.layer} with {times(hottest.times_mean)} its layer’s mean load.",
        ),
    )


def micro_batch_skew(summary: Summary) -> str:
    """Show rank skew over micro-batches; nothing when no rank count is possible."""
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
        "Rank skew of each micro-batch",
        paragraph(
            f"Rank skew = token-slots of the busiest rank / mean over ranks, in the static contiguous layout. Line: "
            f"mean over layers. Band: from the least to the most skewed layer. A micro-batch is "
            f"{plural(summary.micro_batch_tokens, 'consecutive token')} of a step; the short rest of a step is a "
            f"micro-batch of its own.{thinned}",
            "how",
        ),
        plot("skew-plot", route_figures.skew_by_micro_batch(summary), f"Rank skew over micro-batches: {words}."),
    )


def rank_sizes(summary: Summary) -> str:
    """Show what other expert-parallel sizes would see of the same routes."""
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
            "More ranks hold fewer experts each, so less evens out within a rank. Static contiguous layout; mean to "
            "maximum are over all pairs of micro-batch and layer. Weighted: the sum of the busiest ranks’ loads / the "
            "sum of the mean loads, so that large micro-batches weigh more. Idle: share of the expert time that "
            "ranks wait for the busiest, 1 − 1 / weighted.",
            "how",
        ),
        *(pieces if rows else []),
        paragraph(f"Not possible with {plural(summary.num_experts, 'expert')}: {', '.join(impossible)} ranks.", "how")
        if impossible
        else "",
    )


def hottest_experts(summary: Summary) -> str:
    """Show the experts with the largest shares, and the groups of samples when they have names."""
    rows = [
        [str(hot.layer), str(hot.expert), f"{100 * hot.share:.1f}\u202f%", times(hot.times_mean)]
        for hot in summary.hottest
    ]
    return section(
        "hottest",
        "Hottest experts",
        paragraph(
            f"Share: token-slots of the expert / token-slots of its layer, all steps together. An equal share would be "
            f"{100 / summary.num_experts:.3g}\u202f%.",
            "how",
        ),
        table("Hottest experts", ("layer", "expert", "share of layer", "times the mean"), rows, text_columns=()),
    )


def groups(summary: Summary) -> str:
    """Show how uneven the load of each named group of samples is by itself; nothing without names."""
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
            f"Each group’s whole load by itself. Expert skew: median over layers of busiest / mean expert. Rank skew: "
            f"mean over layers on {view.ranks} ranks, static contiguous layout."
            + (f" The {plural(more, 'group')} with fewest tokens are left out." if more else ""),
            "how",
        ),
        table("Groups of samples", ("group", "samples", "tokens", "expert skew", "rank skew"), rows, text_columns=(0,)),
    )


def stability(summary: Summary) -> str:
    """Show how alike micro-batches are, and what that means for planning."""
    value = summary.stability
    words = one_plan_or_many(value)
    pieces = [paragraph(words), paragraph(history(value)) if history(value) else ""]
    if value.micro_batches > 1:
        pieces += [
            paragraph(
                "Cosine: between the expert load of a micro-batch and that of its whole step, per layer. Chance alone: "
                "what micro-batches of this size would show if each were a random draw from the step. As a rule of "
                f"thumb, from {ALIKE} on one plan fits a whole step, below {DIFFERENT} it fits few of its "
                f"micro-batches. Fluctuation: an expert’s share of its layer varies by {percent(value.fluctuation)} of "
                "itself (standard deviation over micro-batches, weighted by load).",
                "how",
            ),
            plot(
                "stability-plot", route_figures.cosine_by_layer(value, summary.layer_ids), f"Cosine per layer. {words}"
            ),
        ]
    return section("stability", "One plan per step, or one per micro-batch?", *pieces)


def glossary() -> str:
    """Explain the words of the page."""
    return section("glossary", "Words", definitions(GLOSSARY))


def _listed(numbers: list[int]) -> str:
    """Write `2, 8 and 32`."""
    words = [str(number) for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
