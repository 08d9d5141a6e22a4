"""The picture of a sweep: a PNG drawn with matplotlib, or a plotly figure for a page."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

from relibra.errors import ConfigError
from relibra.reporting.data.sweep_lines import SweepLines, setting_name
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
    """Return the picture as a PNG file."""
    figure = load_matplotlib().Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bars = sweep.has_bars
    for number, (name, (positions, values)) in enumerate(sweep.lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        if bars:
            axes.barh(positions, values, color=colour, label=name)
        else:
            dashed = sweep.is_static(name)
            axes.plot(positions, values, "--" * dashed, marker="o", color=GREY if dashed else colour, label=name)
    axes.set_title(title)
    (axes.set_xlabel if bars else axes.set_ylabel)(VALUE_NAME)
    if not bars:
        axes.set_xlabel(sweep.axis_name)
        axes.set_xscale("log" if sweep.is_log else "linear")
        axes.set_xticks(sweep.ticks, [f"{tick:,}" for tick in sweep.ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
    if any(sweep.lines):
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def sweep_figure(sweep: SweepLines) -> Any:
    """Draw the lines, or bars of balancers, with plotly; all values from 0."""
    figure = plotly_figures().Figure()
    bars = sweep.has_bars
    for number, (name, (positions, values)) in enumerate(sweep.lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        if bars:
            hover = "%{y}: %{x:,.0f}<extra></extra>"
            figure.add_bar(x=values, y=positions, orientation="h", name=name, marker_color=colour, hovertemplate=hover)
        else:
            hover = f"{name}{', ' * bool(name)}%{{x}} {setting_name(sweep.axis)}: %{{y:,.0f}}<extra></extra>"
            dashed = sweep.is_static(name)
            line = {"color": GREY if dashed else colour, "dash": "dash" if dashed else "solid"}
            figure.add_scatter(x=positions, y=values, mode="lines+markers", name=name, line=line, hovertemplate=hover)
    figure.update_layout(
        height=100 + 44 * len(sweep.ticks) if bars else 440,
        showlegend=any(sweep.lines),
        xaxis={"title": {"text": VALUE_NAME if bars else sweep.axis_name}, "rangemode": "tozero" if bars else "normal"},
        yaxis={"automargin": True} if bars else {"title": {"text": VALUE_NAME}, "rangemode": "tozero"},
    )
    if not bars:
        ticks = {"tickmode": "array", "tickvals": sweep.ticks, "ticktext": [f"{tick:,}" for tick in sweep.ticks]}
        figure.update_xaxes(type="log" if sweep.is_log else "linear", **ticks)
    return figure
