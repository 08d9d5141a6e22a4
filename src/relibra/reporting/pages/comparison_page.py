"""`write_comparison`: two training runs side by side, curve by curve."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import relibra
from relibra.errors import ConfigError
from relibra.printable import plural
from relibra.reporting.data.recording import Recording, open_recording
from relibra.reporting.html.glossary import LOAD_WORDS, glossary
from relibra.reporting.html.html import paragraph, plot, section
from relibra.reporting.html.html_page import check_output, html_page, write_page
from relibra.reporting.html.route_figures import plotly_figures
from relibra.reporting.html.run_figures import compared_panels, has_any
from relibra.reporting.pages.run_sections import PANELS, figures
from relibra.reporting.settings.listing import describe_differences
from relibra.reporting.settings.sections import differences_section


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
    pieces = [figures(pairs), differences_section(configs, names)]
    for identifier, one in PANELS.items():
        if any(has_any(found, one.panels) for found in metrics):
            figure = plot(
                f"{identifier}-plot", compared_panels(pairs, one.panels), f"{one.title} of {' and '.join(names)}."
            )
            pieces.append(section(identifier, one.title, figure))
    pieces.append(glossary(LOAD_WORDS))
    steps = "; ".join(f"{name}: {plural(len(one.rows), 'step')}" for name, one in pairs)
    footer = paragraph(f"relibra {relibra.__version__}, {made:%Y-%m-%d %H:%M} UTC · {steps}")
    title = " and ".join(names)
    return html_page(
        title,
        "comparison of runs",
        describe_differences(configs, names) if any(configs) else "",
        "\n".join(filter(None, pieces)),
        footer,
        scripts=("page.js",),
        plotly=True,
    )
