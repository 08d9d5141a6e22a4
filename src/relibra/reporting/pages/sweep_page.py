"""The plot of a sweep: throughput over the varied setting, as a PNG or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from relibra.reporting.html.page import render_page
from relibra.reporting.html.route_figures import plotly_figures
from relibra.reporting.html.sweep_figures import VALUE_NAME, load_matplotlib, sweep_figure, sweep_png

KINDS = (".png", ".html")


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
    return render_page(
        "sweep.html",
        title=title,
        kind="sweep",
        headline=f"Most {VALUE_NAME}, simulated: {best[VALUE]:,.0f} with {best_settings}.",
        facts=["docs/simulation.md describes the model of the machine"],
        value_name=VALUE_NAME,
        axis_name=sweep.axis_name,
        figure=sweep_figure(sweep),
        constants=describe_constants(rows, [name for name in constant if name not in names]),
        header=[*map(setting_name, names), "tokens/s per rank", "/ static"],
        rows=[
            [*(_text(row, name) for name in names), f"{row[VALUE]:,.0f}", f"{row[VALUE] / row[STATIC_VALUE]:.3f}"]
            for row in rows
        ],
        text_columns=[number for number, name in enumerate(names) if name == "balancer"],
    )


def _text(row: dict[str, Any], name: str) -> str:
    return balancer_text(row) if name == "balancer" else setting_text(row[name])
