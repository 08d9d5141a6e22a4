"""The picture of a sweep: a PNG drawn with matplotlib, or a plotly figure for a page."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

from relibra.errors import ConfigError
from relibra.reporting.data.sweep_lines import STATIC, SweepLines, setting_text
from relibra.reporting.html.route_figures import PALETTE, plotly_figures

VALUE_NAME = "tokens per second and rank"
GREY = "#8a8a8a"
"""Colour of the static layout, whose lines are dashed."""


def load_matplotlib() -> ModuleType:
    """Return matplotlib's figure module.

    raises    ConfigError when matplotlib is not installed
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError(
            "a .png is drawn with matplotlib, which is not installed: in the checkout, pip install -e '.[report]', or "
            "name an .html"
        ) from error
    return matplotlib.figure


def sweep_png(sweep: SweepLines, title: str) -> bytes:
    """Return the picture as a PNG file; values begin at 0."""
    figure = load_matplotlib().Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(sweep.lines.items()):
        colour, dash = _style(name, number)
        axes.plot(
            list(points), list(points.values()), "--" if dash == "dash" else "-", marker="o", color=colour, label=name
        )
    axes.set(title=title, xlabel=sweep.axis_name, ylabel=VALUE_NAME, xscale="log" if sweep.is_log else "linear")
    axes.set_xticks(sweep.ticks, [setting_text(tick) for tick in sweep.ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    if any(sweep.lines):
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def sweep_figure(sweep: SweepLines) -> Any:
    """Draw the lines with plotly; values begin at 0."""
    figure = plotly_figures().Figure()
    for number, (name, points) in enumerate(sweep.lines.items()):
        colour, dash = _style(name, number)
        figure.add_scatter(
            x=list(points),
            y=list(points.values()),
            mode="lines+markers",
            name=name,
            line={"color": colour, "dash": dash},
            hovertemplate=f"{sweep.axis_name} %{{x}}: %{{y:,.0f}} {name}<extra></extra>",
        )
    kind = "category" if sweep.axis == "balancer" else "log" if sweep.is_log else "linear"
    ticks = {"tickmode": "array", "tickvals": sweep.ticks, "ticktext": list(map(setting_text, sweep.ticks))}
    figure.update_layout(
        height=440,
        showlegend=any(sweep.lines),
        xaxis={"title": {"text": sweep.axis_name}, "type": kind, **ticks},
        yaxis={"title": {"text": VALUE_NAME}, "rangemode": "tozero"},
    )
    return figure


def _style(name: str, number: int) -> tuple[str, str]:
    is_static = STATIC in name.split(", ")
    return (GREY, "dash") if is_static else (PALETTE[number % len(PALETTE)], "solid")
