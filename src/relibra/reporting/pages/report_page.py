"""`write_report`: one self-contained HTML page about a run, or about the routes of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import relibra
from relibra.cluster import Cluster
from relibra.printable import plural
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import count, percent, times
from relibra.reporting.data.planned_step import PlannedStep, plan_last_step
from relibra.reporting.data.recording import Recording, open_recording
from relibra.reporting.data.samples import Samples, read_samples
from relibra.reporting.data.summary import Step, Summary, possible_ranks, summarize
from relibra.reporting.html.glossary import LOAD_WORDS, PLAN_WORDS, ROUTE_WORDS, glossary
from relibra.reporting.html.html import paragraph, section
from relibra.reporting.html.html_page import check_output, html_page, write_page
from relibra.reporting.html.route_figures import plotly_figures, ranks_in_words
from relibra.reporting.html.sample_browser import sample_browser
from relibra.reporting.pages import route_sections, run_sections
from relibra.reporting.pages.plan_page import SCRIPTS, step_headline, step_sections
from relibra.reporting.settings.sections import settings_section
from relibra.routing.trace_statistics import compute_step_statistics
from relibra.simulation import ModelShape
from relibra.timeline import Timeline


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
    output = Path(output)
    check_output(output)
    summary = summarize_recording(recording) if recording.traces else None
    planned = plan_last_step(recording, ranks=ranks, cluster=cluster, model=model)
    return write_page(output, render_page(recording, summary, samples, datetime.now(UTC), planned, timelines))


def summarize_recording(recording: Recording) -> Summary:
    """Read the traces of a recording one by one, in pieces, and summarize them.

    raises    TraceError on a damaged trace, or when steps come from different models
    """
    tokens = recording.micro_batch_tokens
    steps: list[Step] = []

    def ranks(num_experts: int) -> Sequence[int]:
        return possible_ranks(num_experts, recording.num_ranks)

    for number, pieces in recording.steps():
        step = Step(number=number, statistics=compute_step_statistics(pieces, ranks=ranks, micro_batch_tokens=tokens))
        steps.append(step)
        if step.statistics.tokens:  # micro-batches of later steps are as large as those of the first
            tokens = step.statistics.micro_batch_tokens
    return summarize(steps, own_ranks=recording.num_ranks)


def render_page(
    recording: Recording,
    summary: Summary | None,
    samples: Samples,
    made: datetime,
    planned: PlannedStep | str = "",
    timelines: Sequence[tuple[str, Timeline]] = (),
) -> str:
    """Return the page as text; the same values give the same bytes.

    Its order: what happened in the run, what the recorded routes are like, then the last step planned again and
    simulated on a cluster.

    summary   of the routes; None: the run recorded none, as that of a dense model
    planned   the last step, to be shown before and after planning, or why it is not
    """
    metrics = recording.metrics
    body = (
        route_sections.summary_cards(summary, metrics),
        settings_section(recording.config) if recording.is_run else "",
        run_sections.figures([("", metrics)]),
        run_sections.panels(metrics, "learning"),
        run_sections.panels(metrics, "balance"),
        run_sections.panels(metrics, "values"),
        run_sections.mismatch(metrics),
        run_sections.panels(metrics, "update"),
        run_sections.time(metrics),
        run_sections.unreadable(metrics),
        sample_browser(samples),
        *(_route_sections(summary) if summary else ()),
        *_step_sections(planned, timelines),
        glossary(LOAD_WORDS, ROUTE_WORDS, PLAN_WORDS if isinstance(planned, PlannedStep) else ()) if summary else "",
    )
    return html_page(
        recording.name,
        "run report" if recording.is_run else "expert load report",
        _headline(metrics, summary),
        "\n".join(piece for piece in body if piece),
        _provenance(recording, summary, made),
        scripts=("page.js", *SCRIPTS * isinstance(planned, PlannedStep)),
        plotly=True,
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
        view, found = summary.headline
        where = f"{ranks_in_words(view)}: rank skew {times(found.skew_weighted)}, waiting {percent(found.idle_share)}"
        facts.append(f"recorded routes without a plan on {where}")
    return " · ".join(facts)


def _step_sections(planned: PlannedStep | str, timelines: Sequence[tuple[str, Timeline]]) -> tuple[str, ...]:
    """Return what the page of a plan shows, after a sentence that says how the step was planned."""
    if isinstance(planned, str):
        return (paragraph(planned, "notice"),) if planned else ()
    key_figures, *others = step_sections(planned.step, timelines)
    words = f"{planned.about} {step_headline(planned.step)}"
    return section("planned", "The last step, planned again", paragraph(words), key_figures), *others


def _route_sections(summary: Summary) -> tuple[str, ...]:
    return (
        route_sections.expert_load(summary),
        route_sections.micro_batch_skew(summary),
        route_sections.rank_sizes(summary),
        route_sections.hottest_experts(summary),
        route_sections.groups(summary),
        route_sections.stability(summary),
    )


def _provenance(recording: Recording, summary: Summary | None, made: datetime) -> str:
    facts = [
        f"relibra {relibra.__version__}, {made:%Y-%m-%d %H:%M} UTC",
        f"source {recording.path.resolve().name}",
        *(_provenance_of_routes(recording, summary) if summary else [plural(len(recording.metrics.rows), "step")]),
    ]
    if recording.unfinished:
        facts.append(f"{plural(recording.unfinished, 'step')} without a finished trace left out")
    return paragraph(" · ".join(facts))


def _provenance_of_routes(recording: Recording, summary: Summary) -> list[str]:
    num_layers, num_experts = summary.load_LE.shape
    return [
        f"recorded by {summary.sources[0]}" + (f" and {len(summary.sources) - 1} more" * (len(summary.sources) > 1)),
        plural(len(summary.steps), "step"),
        f"{count(summary.tokens)} routed tokens",
        plural(num_layers, "layer"),
        plural(num_experts, "expert"),
        f"{plural(summary.top_k, 'choice')} per token",
        f"micro-batches of {count(summary.micro_batch_tokens)} tokens "
        + ("(the run’s)" if recording.micro_batch_tokens else "(chosen by the report)"),
    ]
