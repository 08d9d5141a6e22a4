"""`write_report`: one self-contained HTML page about a run, or about the routes of a trace.

The page holds its script, its style and its data, and forbids itself any network request by a content security policy,
so it can be mailed, archived and opened offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path

import relibra
from relibra.errors import ConfigError
from relibra.files import write_text
from relibra.reporting import run_sections, sections
from relibra.reporting.elements import paragraph
from relibra.reporting.pictures import plotly_figures, plotly_script
from relibra.reporting.recording import Recording, open_recording
from relibra.reporting.sample_browser import browser
from relibra.reporting.samples import Samples, read_samples
from relibra.reporting.sentences import count, plural, verdict
from relibra.reporting.summary import Step, Summary, possible_ranks, summarize
from relibra.routing.survey import survey_step

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(path: Path | str, output: Path | str | None = None) -> Path:
    """Write the report of a run folder or a single trace, whole or not at all, and return where it is.

    path      a run folder, a trace folder, or an `.npz` of expert choices
    output    the HTML file; None: `report.html` in the run folder, or `NAME.report.html` beside the trace
    raises    TraceError when there is neither a finished trace nor a finished step, or a trace is damaged; ConfigError
              without plotly, or when `output` cannot be written
    """
    plotly_figures()  # before minutes of reading
    recording = open_recording(path)
    samples = read_samples(recording.path / "samples.jsonl") if recording.is_run else Samples()
    if output is None:
        place = recording.path.resolve()
        output = place / "report.html" if recording.is_run else place.with_name(f"{place.name}.report.html")
    output = Path(output)
    with place_problems(output):
        refuse_folder(output)
    summary = summarize_recording(recording) if recording.traces else None
    page = render_page(recording, summary, samples, datetime.now(UTC))
    with place_problems(output):
        write_text(output, page)
    return output


def refuse_folder(output: Path) -> None:
    """Raise a ConfigError when the place for a page is a folder."""
    if output.is_dir():
        raise ConfigError(f"the report cannot be written to {output}, which is a folder: name an .html file in it")


@contextmanager
def place_problems(output: Path) -> Iterator[None]:
    """Tell what the file system says of the place for the report in one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {output} ({error.strerror or error}): name another file with --output"
        ) from error


def summarize_recording(recording: Recording) -> Summary:
    """Read the traces of a recording one by one, in pieces, and summarize them.

    raises    TraceError on a damaged trace, or when steps come from different models
    """
    tokens = recording.micro_batch_tokens
    steps: list[Step] = []

    def ranks(num_experts: int) -> Sequence[int]:
        return possible_ranks(num_experts, recording.num_ranks)

    for number, pieces in recording.steps():
        step = Step(number=number, survey=survey_step(pieces, ranks=ranks, micro_batch_tokens=tokens))
        steps.append(step)
        if step.survey.tokens:  # micro-batches of later steps are as large as those of the first
            tokens = step.survey.micro_batch_tokens
    return summarize(steps, own_ranks=recording.num_ranks)


def render_page(recording: Recording, summary: Summary | None, samples: Samples, made: datetime) -> str:
    """Return the page as text; the same values give the same bytes.

    summary   of the routes; None: the run recorded none, as that of a dense model
    """
    metrics = recording.metrics
    of_run = (
        run_sections.learning(metrics),
        run_sections.balance(metrics),
        run_sections.value_model(metrics),
        run_sections.mismatch(metrics),
        run_sections.update(metrics),
        run_sections.time(metrics),
        run_sections.unreadable(metrics),
        browser(samples),
    )
    of_routes = () if summary is None else _of_routes(summary)
    cost = verdict(summary, planned=metrics.has("planned_skew")) if summary else ""
    first = (*run_sections.headline(metrics), cost)
    return html_page(
        recording.name,
        "run report" if recording.is_run else "expert load report",
        " ".join(sentence for sentence in first if sentence),
        "\n".join(piece for piece in (sections.summary_cards(summary, metrics), *of_run, *of_routes) if piece),
        _provenance(recording, summary, made),
    )


def _of_routes(summary: Summary) -> tuple[str, ...]:
    return (
        sections.expert_load(summary),
        sections.micro_batch_skew(summary),
        sections.rank_sizes(summary),
        sections.hottest_experts(summary),
        sections.groups(summary),
        sections.stability(summary),
        sections.glossary(),
    )


def html_page(name: str, kind: str, first_sentence: str, body: str, footer: str) -> str:
    """Return a whole page with its script and style in it.

    name, kind, first_sentence   plain text
    body, footer                 trusted HTML
    """
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="relibra {relibra.__version__}">
<title>{escape(name)}: {escape(kind)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<p class="kicker">relibra {escape(kind)}</p>
<h1>{escape(name)}</h1>
{paragraph(first_sentence, "verdict")}
</header>
<main>
{body}
</main>
<footer>{footer}</footer>
<noscript><p class="notice">The figures need JavaScript; the sentences and tables do not.</p></noscript>
<script>
{plotly_script()}
</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", page)  # halves of characters in a name: no file can hold them


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


def _asset(name: str) -> str:
    text = files("relibra.reporting").joinpath(name).read_text(encoding="utf-8")
    assert not re.search(r"</(script|style)", text), f"{name} would end its own element"
    return text
