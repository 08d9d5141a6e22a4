"""The plot of a sweep: throughput over the varied setting, as a PNG or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import relibra
from relibra.errors import ConfigError
from relibra.files import atomic_path, write_text
from relibra.reporting.data.sweep_lines import (
    STATIC_VALUE,
    VALUE,
    SweepLines,
    balancer_text,
    describe_constants,
    setting_name,
    setting_text,
    sweep_lines,
)
from relibra.reporting.html.html import paragraph, plot, section, table
from relibra.reporting.html.html_page import html_page
from relibra.reporting.html.route_figures import plotly_figures
from relibra.reporting.html.sweep_figures import VALUE_NAME, load_matplotlib, sweep_figure, sweep_png

KINDS = (".png", ".html")

ABOUT = (
    "nothing was measured. Each balancer plans on which ranks experts are computed. A step pays its part of moves "
    "of experts to other ranks, which are spread over the steps that they serve (--steps). Static: experts stay where "
    "they are; dashed where it is drawn beside the balancers."
)


def check_plot(path: Path) -> None:
    """Check, before minutes of work, that the plot can be drawn.

    raises    ConfigError for another kind of file, or when the package that draws it is not installed
    """
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot {path} is neither a {KINDS[0]} nor a {KINDS[1]} file: name one of them")
    if path.suffix == ".html":
        plotly_figures()
    else:
        load_matplotlib()


def draw_sweep(
    path: Path, rows: Sequence[dict[str, Any]], varied: Sequence[str], constant: Sequence[str], title: str
) -> None:
    """Draw rows that differ in the settings `varied`; values begin at 0.

    constant  the other settings
    title     model and machine
    raises    ConfigError as `check_plot`
    """
    check_plot(path)
    sweep = sweep_lines(rows, varied)
    if path.suffix == ".html":
        write_text(path, _page(sweep, title, rows, varied, constant))
    else:
        picture = sweep_png(sweep, title)
        with atomic_path(path) as temporary:
            temporary.write_bytes(picture)


def _page(
    sweep: SweepLines, title: str, rows: Sequence[dict[str, Any]], varied: Sequence[str], constant: Sequence[str]
) -> str:
    best = max(rows, key=lambda row: row[VALUE])
    names = list(varied) or ["ranks", "balancer"]
    best_settings = ", ".join(f"{setting_name(name)} {_text(best, name)}" for name in names)
    constants = describe_constants(rows, [name for name in constant if name not in names])
    shared = f"The same for all {len(rows)} points: {constants}." if constants else ""
    cells = [
        [*(_text(row, name) for name in names), f"{row[VALUE]:,.0f}", f"{row[VALUE] / row[STATIC_VALUE]:.3f}"]
        for row in rows
    ]
    texts = [number for number, name in enumerate(names) if name == "balancer"]
    body = section(
        "sweep",
        VALUE_NAME[:1].upper() + VALUE_NAME[1:],
        paragraph(f"A training step of {title}: {ABOUT} {shared}", "how"),
        plot("sweep-plot", sweep_figure(sweep), f"{VALUE_NAME} over {sweep.axis_name}; see the table below"),
        table(
            "Points of the sweep",
            [*map(setting_name, names), "tokens/s per rank", "/ static"],
            cells,
            text_columns=texts,
        ),
    )
    sentence = f"Most {VALUE_NAME}, simulated: {best[VALUE]:,.0f} with {best_settings}."
    footer = paragraph(f"relibra {relibra.__version__}; docs/simulation.md describes the model of the machine")
    return html_page(title, "sweep", sentence, body, footer, scripts=("page.js",), plotly=True)


def _text(row: dict[str, Any], name: str) -> str:
    return balancer_text(row) if name == "balancer" else setting_text(row[name])
