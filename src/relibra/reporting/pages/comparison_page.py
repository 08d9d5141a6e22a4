"""`write_comparison`: two training runs side by side, curve by curve."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from relibra.errors import ConfigError
from relibra.printable import plural
from relibra.reporting.data.recording import open_recording
from relibra.reporting.data.settings import compare_settings
from relibra.reporting.html.page import render_page, write_page
from relibra.reporting.html.route_figures import plotly_figures
from relibra.reporting.html.run_figures import TITLES, section_figures
from relibra.reporting.pages.run_values import key_figures


def write_comparison(first: Path | str, second: Path | str, output: Path | str) -> Path:
    """Write a page about two runs, whole or not at all, and return where it is.

    raises    TraceError for a path that is not a run; ConfigError when a run has no finished step, without plotly, or
              when the page cannot be written there
    """
    plotly_figures()
    runs = [open_recording(path) for path in (first, second)]
    for run in runs:
        if not run.metrics.rows:
            raise ConfigError(f"{run.path} has no finished step in metrics.jsonl: only runs of relibra train compare")
    choices = ([run.name for run in runs], [run.path.resolve().name for run in runs], [str(run.path) for run in runs])
    names = next((unlike for unlike in choices if len(set(unlike)) == len(runs)), choices[-1])
    pairs = [(name, run.metrics) for name, run in zip(names, runs, strict=True)]
    differences, note = compare_settings([run.config for run in runs], names)
    page = render_page(
        "comparison.html",
        title=" and ".join(names),
        kind="comparison of runs",
        headline=note,
        facts=[
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            *(f"{name}: {plural(len(item.rows), 'step')}" for name, item in pairs),
        ],
        names=names,
        figures=key_figures([metrics for _, metrics in pairs]),
        settings_note=note,
        differences=differences,
        panels=section_figures(pairs),
        titles=TITLES,
        words=(),
    )
    return write_page(Path(output), page)
