"""`write_comparison`: two training runs side by side, curve by curve."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import relibra
from relibra.errors import ConfigError
from relibra.reporting.data.metrics import Metrics
from relibra.reporting.data.number_format import plural
from relibra.reporting.data.recording import Recording, open_recording
from relibra.reporting.html import run_figures
from relibra.reporting.html.glossary import LOAD_WORDS, glossary
from relibra.reporting.html.html import paragraph, plot, section, table
from relibra.reporting.html.html_page import check_output, html_page, write_page
from relibra.reporting.html.route_figures import plotly_figures
from relibra.reporting.html.run_figures import Panel, compared_panels, has_any
from relibra.reporting.settings.listing import describe_differences
from relibra.reporting.settings.sections import differences_section

FIGURES = (
    ("reward", "", "reward, last step", ".3f"),
    ("evaluation", "reward", "reward of the last evaluation", ".3f"),
    ("response_length", "", "tokens per response, last step", ",.0f"),
    ("rank_skew", "", "rank skew without a plan (largest / mean load), mean", ".3f"),
    ("planned_skew", "", "rank skew as planned, mean", ".3f"),
    ("k3_kl", "", "k3 divergence of rollout and trainer, mean (nats)", ".2e"),
    ("idle_share", "", "idle share of the rollout batch, mean", ".1%"),
)
"""Key, part, meaning with unit, form; a meaning with "last" shows the last step that has it, others the mean."""

SECTIONS: tuple[tuple[str, str, tuple[Panel, ...]], ...] = (
    ("learning", "Learning", run_figures.LEARNING),
    ("balance", "Balance", run_figures.BALANCE),
    ("mismatch", "Mismatch of rollout and trainer", run_figures.MISMATCH),
    ("values", "Value model", run_figures.VALUES),
    ("update", "Policy update", run_figures.UPDATE),
    ("idle", "Idle share of the rollout batch", run_figures.IDLE),
)


def write_comparison(first: Path | str, second: Path | str, output: Path | str) -> Path:
    """Write a page about two runs, whole or not at all, and return where it is.

    raises    TraceError for a path that is not a run; ConfigError when a run has no finished step, without plotly, or
              when the page cannot be written there
    """
    plotly_figures()
    output = Path(output)
    check_output(output)
    runs = [open_recording(path) for path in (first, second)]
    for run in runs:
        if not run.metrics.rows:
            raise ConfigError(f"{run.path} has no finished step in metrics.jsonl: only runs of relibra train compare")
    return write_page(output, render_comparison(runs, datetime.now(UTC)))


def render_comparison(runs: Sequence[Recording], made: datetime) -> str:
    """Return the page as text; the same values give the same bytes."""
    choices = ([run.name for run in runs], [run.path.resolve().name for run in runs], [str(run.path) for run in runs])
    names = next(names for names in choices if len(set(names)) == len(runs) or names is choices[-1])
    metrics = [run.metrics for run in runs]
    pairs = list(zip(names, metrics, strict=True))
    configs = [run.config for run in runs]
    pieces = [section("figures", "Key figures", _figures(pairs)), differences_section(configs, names)]
    for identifier, title, panels in SECTIONS:
        if any(has_any(one, panels) for one in metrics):
            words = f"{title} of {' and '.join(names)} over RL steps."
            pieces.append(section(identifier, title, plot(f"{identifier}-plot", compared_panels(pairs, panels), words)))
    pieces.append(glossary(LOAD_WORDS))
    steps = "; ".join(f"{name}: {plural(len(one.rows), 'step')}" for name, one in pairs)
    footer = paragraph(f"relibra {relibra.__version__}, {made:%Y-%m-%d %H:%M} UTC · {steps}")
    title = " and ".join(names)
    return html_page(
        title,
        "comparison of runs",
        " ".join(
            filter(None, (_describe_rewards(pairs), describe_differences(configs, names) if any(configs) else ""))
        ),
        "\n".join(filter(None, pieces)),
        footer,
        scripts=("page.js",),
        plotly=True,
    )


def _figures(pairs: Sequence[tuple[str, Metrics]]) -> str:
    rows = []
    for key, part, meaning, form in FIGURES:
        cells = [_cell(metrics, key, part, form, last="last" in meaning) for _, metrics in pairs]
        if any(cells):
            rows.append([meaning, *(cell or "–" for cell in cells)])
    seconds = [_seconds(metrics) for _, metrics in pairs]
    if any(seconds):
        rows.append(["seconds per step, mean (measured)", *(f"{value:.2f}" if value else "–" for value in seconds)])
    return table("Figures of the runs", ("", *(name for name, _ in pairs)), rows, text_columns=(0,))


def _cell(metrics: Metrics, key: str, part: str, form: str, *, last: bool) -> str:
    known = metrics.known(key, part)
    if not known:
        return ""
    return format(known[-1] if last else fmean(known), form)


def _seconds(metrics: Metrics) -> float:
    return sum(sum(metrics.known("seconds", stage)) for stage in metrics.seconds()) / max(1, len(metrics.rows))


def _describe_rewards(pairs: Sequence[tuple[str, Metrics]]) -> str:
    last = [(name, metrics.last("reward")) for name, metrics in pairs]
    known = [(name, value) for name, value in last if value is not None]
    if len(known) < 2:
        return "Two runs; at least one of them has no reward."
    (first, before), (second, after) = known
    return f"The last step of {first} had a mean reward of {before:.3f}, that of {second} {after:.3f}."
