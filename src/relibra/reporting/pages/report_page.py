"""`write_report`: one self-contained HTML page about a run, or about the routes of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from relibra.cluster import Cluster
from relibra.printable import plural
from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.iteration_stages import predict_run
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import count, percent, times
from relibra.reporting.data.planned_step import plan_last_step
from relibra.reporting.data.recording import Recording, open_recording
from relibra.reporting.data.samples import Samples, read_samples
from relibra.reporting.data.settings import setting_tables
from relibra.reporting.data.summary import Step, Summary, possible_ranks, summarize
from relibra.reporting.html import route_figures
from relibra.reporting.html.page import render_page, write_page
from relibra.reporting.html.route_figures import plotly_figures
from relibra.reporting.pages.run_values import run_values
from relibra.reporting.pages.step_values import Bar, step_headline, step_values
from relibra.routing.readers import iterate_routes
from relibra.routing.statistics import rank_skew, skew
from relibra.routing.trace_statistics import compute_step_statistics
from relibra.simulation import ModelShape
from relibra.timeline import Timeline

Card = tuple[str, str, str]
"""Label, value and note."""

SAMPLES_AT_ONCE, MAX_CARDS, MAX_GROUPS = 12, 8, 12

SKEW_COLUMNS = ("skew_mean", "skew_median", "skew_p95", "skew_max", "skew_weighted")
"""Figures of `RankSkew`, ordered as `relibra trace stats` does."""


def write_report(
    path: Path | str,
    output: Path | str | None = None,
    *,
    num_experts: int | None = None,
    ranks: int | None = None,
    cluster: Cluster | None = None,
    model: ModelShape | None = None,
    timelines: Sequence[tuple[str, Timeline]] = (),
) -> Path:
    """Write the report of a run folder or a single trace, whole or not at all, and return where it is.

    path          a run folder, a trace folder, or an `.npz` or `.npy` of expert choices
    output        the HTML file; None: `report.html` in the run folder, or `NAME.report.html` beside the trace
    num_experts   experts per layer, for an `.npz` or `.npy`
    ranks, cluster, model   what the last step is planned for (`plan_last_step`)
    timelines     (name, timeline) to be shown with it
    raises    TraceError when there is neither a finished trace nor a finished step, or a trace is damaged; ConfigError
              without plotly, or when `output` cannot be written
    """
    plotly_figures()  # before minutes of reading
    recording = open_recording(path, num_experts)
    samples = read_samples(recording.path / "samples.jsonl") if recording.is_run else Samples()
    if output is None:
        place = recording.path.resolve()
        output = place / "report.html" if recording.is_run else place.with_name(f"{place.name}.report.html")
    summary = summarize_recording(recording) if recording.traces else None
    step, about = plan_last_step(recording, ranks=ranks, cluster=cluster, model=model)
    return write_page(
        Path(output), render_report(recording, summary, samples, datetime.now(UTC), step, about, timelines)
    )


def summarize_recording(recording: Recording) -> Summary:
    """Read the traces of a recording one by one, in pieces, and summarize them.

    raises    TraceError on a damaged trace, or when steps come from different models
    """
    tokens = recording.micro_batch_tokens
    steps: list[Step] = []
    ranks = partial(possible_ranks, own_ranks=recording.num_ranks)
    for number, path in recording.traces:
        pieces = partial(iterate_routes, path, recording.num_experts)
        statistics = compute_step_statistics(pieces, ranks=ranks, micro_batch_tokens=tokens)
        steps.append(Step(number=number, statistics=statistics))
        if statistics.tokens:  # micro-batches of later steps are as large as those of the first
            tokens = statistics.micro_batch_tokens
    return summarize(steps, own_ranks=recording.num_ranks)


def render_report(
    recording: Recording,
    summary: Summary | None,
    samples: Samples,
    made: datetime,
    step: ComparedStep | None = None,
    step_about: str = "",
    timelines: Sequence[tuple[str, Timeline]] = (),
) -> str:
    """Return the page as text; the same values give the same bytes.

    Its order: what happened in the run, what the recorded routes are like, then the last step planned again and
    simulated on a cluster.

    summary   of the routes; None: the run recorded none, as that of a dense model
    step      the last one, to be shown before and after planning; step_about: how it was planned, or why not
    """
    metrics = recording.metrics
    config = recording.config if recording.is_run else {}
    return render_page(
        "report.html",
        title=recording.name,
        kind="run report" if recording.is_run else "expert load report",
        headline=_headline(metrics, summary),
        facts=_facts(recording, summary, made),
        cards=[*_run_cards(metrics), *(_load_cards(summary) if summary else [])][:MAX_CARDS],
        settings=setting_tables(config),
        run=run_values(metrics, predict_run(recording, step) if step else None),
        samples=samples,
        samples_at_once=SAMPLES_AT_ONCE,
        summary=summary,
        routes=route_values(summary) if summary else None,
        step=step_values(step, timelines) if step else None,
        step_about=step_about,
        step_headline=step_headline(step) if step else "",
        words=("routes", "plans") if step else ("routes",),
    )


def _headline(metrics: Metrics, summary: Summary | None) -> str:
    """Return the first line: reward and rank skew of the run, and skew of the recorded routes without a plan."""
    facts = []
    if rewards := metrics.known("reward"):
        facts.append(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
    static, planned = metrics.known("rank_skew"), metrics.known("planned_skew")
    if static and planned:
        facts.append(f"rank skew in training {times(fmean(static))} → {times(fmean(planned))}")
    if summary and summary.headline:
        ranks, found = summary.headline
        where = (
            f"{summary.ranks_name(ranks)}: rank skew {times(found.skew_weighted)}, waiting {percent(found.idle_share)}"
        )
        facts.append(f"recorded routes without a plan on {where}")
    return " · ".join(facts)


def _run_cards(metrics: Metrics) -> list[Card]:
    found = (
        ("Reward", metrics.last("reward"), "{:.3f}", "mean of the last step"),
        ("Evaluation", metrics.last("evaluation", "reward"), "{:.3f}", "mean reward on held-out prompts"),
        ("Response length", metrics.last("response_length"), "{:,.0f}", "tokens, mean of the last step"),
        ("Rank skew, planned", metrics.last("planned_skew"), "{:.2f}×", "last step, in training: busiest / mean load"),
    )
    return [(label, form.format(value), note) for label, value, form, note in found if value is not None]


def _load_cards(summary: Summary) -> list[Card]:
    L, E = summary.load_LE.shape
    hottest = summary.hottest[0]
    amount = f"{plural(summary.samples, 'sample')}, {plural(len(summary.steps), 'step')}"
    skews: list[Card] = []
    if summary.headline:
        ranks, found = summary.headline
        skews = [
            (f"Rank skew, {ranks} ranks", times(found.skew_weighted), "of the recorded routes without a plan"),
            (f"Waiting, {ranks} ranks", percent(found.idle_share), "of the expert time, without a plan"),
        ]
    return [
        ("Model", f"{L} × {E}", f"layers × experts, {plural(summary.top_k, 'choice')} per token"),
        ("Routed tokens", count(summary.tokens), amount),
        *skews,
        ("Busiest expert", times(hottest.times_mean), f"the mean load: layer {hottest.layer}, expert {hottest.expert}"),
        ("Micro-batch to step", f"{summary.stability.cosine:.3f}", "cosine of expert loads; 1 = alike"),
    ]


def route_values(summary: Summary) -> dict[str, Any]:
    """Return the values of routes.html."""
    stability, skews = summary.stability, summary.skews
    several = stability.micro_batches > 1
    ranks = summary.headline[0] if summary.headline else None
    sizes = [
        [summary.ranks_name(R), *(f"{getattr(found, name):.2f}" for name in SKEW_COLUMNS), percent(found.idle_share)]
        for R, found in skews.items()
    ]
    step_to_step = stability.step_to_step
    figures = {
        "cosine of a micro-batch and its step, mean": f"{stability.cosine:.3f}",
        "the same by chance alone": f"{stability.chance:.3f}" if several else "",
        "fluctuation of an expert’s share": percent(stability.fluctuation) if several else "",
        "cosine of a step and the step before it, mean": "" if step_to_step is None else f"{step_to_step:.3f}",
    }
    return {
        "views": [label for label, _ in route_figures.heatmap_views(summary)],
        "heatmap": route_figures.expert_heatmap(summary),
        "max_points": route_figures.MAX_POINTS,
        "micro_batches": route_figures.skew_by_micro_batch(summary) if skews else None,
        "bars": [
            Bar(row[0], 1.0, found.skew_median, tuple(row[2:4]), mark=found.skew_p95)
            for row, found in zip(sizes, skews.values(), strict=True)
        ],
        "bars_end": max([1.01, *(found.skew_p95 for found in skews.values())]),
        "sizes": sizes,
        "impossible": [R for R in summary.ranks if R not in skews],
        "hottest": [
            [hot.layer, hot.expert, f"{100 * hot.share:.1f}\u202f%", times(hot.times_mean)] for hot in summary.hottest
        ],
        "groups": [
            [
                *(group.name, count(group.samples), count(group.tokens), f"{np.median(skew(group.load_LE)):.2f}"),
                f"{rank_skew(group.load_LE, ranks).mean():.2f}",
            ]
            for group in summary.groups[:MAX_GROUPS]
            if ranks is not None
        ],
        "stability": [[name, figure] for name, figure in figures.items() if figure],
        "cosines": route_figures.cosine_by_layer(stability, summary.layer_ids) if several else None,
    }


def _facts(recording: Recording, summary: Summary | None, made: datetime) -> list[str]:
    facts = [f"{made:%Y-%m-%d %H:%M} UTC", f"source {recording.path.resolve().name}"]
    if summary is None:
        facts.append(plural(len(recording.metrics.rows), "step"))
    else:
        chosen_by = "the run’s" if recording.micro_batch_tokens else "chosen by the report"
        facts += [
            f"recorded by {', '.join(summary.sources)}",
            plural(len(summary.steps), "step"),
            f"{count(summary.tokens)} routed tokens",
            plural(len(summary.layer_ids), "layer"),
            plural(summary.num_experts, "expert"),
            f"{plural(summary.top_k, 'choice')} per token",
            f"micro-batches of {count(summary.micro_batch_tokens)} tokens ({chosen_by})",
        ]
    if recording.unfinished:
        facts.append(f"{plural(recording.unfinished, 'step')} without a finished trace left out")
    return facts
