"""Plotly figures about recorded routes, drawn from `Summary` values.

Colours of text, axes and grid are left to the page, which sets them to fit a light or a dark screen. Lines use the
palette of Okabe and Ito, areas cividis: both suit any common colour vision.
"""

from __future__ import annotations

from html import escape
from types import ModuleType
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import ConfigError
from relibra.reporting.data.compared_plans import times_mean
from relibra.reporting.data.summary import Stability, Summary, evenly_chosen

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_POINTS = 400
MAX_HEATMAP_STEPS = 12
MAX_HEATMAP_CELLS = 150_000
"""Cells of all views together: about 11 bytes each on the page."""


def plotly_figures() -> ModuleType:
    """Return plotly's figure classes.

    raises    ConfigError when plotly is not installed
    """
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise ConfigError(
            "the report draws with plotly, which is not installed: in the checkout, pip install -e '.[report]'"
        ) from error
    return plotly.graph_objects


def plotly_script() -> str:
    """Return the text of plotly.js; `plotly_figures` says when plotly is missing."""
    import plotly.offline

    return str(plotly.offline.get_plotlyjs())


def heatmap_views(summary: Summary) -> list[tuple[str, ndarray]]:
    """Return the (label, load_LE) that the heatmap can show: all steps together, then some single ones."""
    views = [("all steps together", summary.load_LE)]
    if len(summary.steps) > 1:
        room = MAX_HEATMAP_CELLS // summary.load_LE.size - 1
        chosen = evenly_chosen(len(summary.steps), min(room, MAX_HEATMAP_STEPS)) if room >= 1 else []
        views += [(f"step {summary.steps[i].number}", summary.steps[i].statistics.load_LE) for i in chosen]
    return views


def expert_heatmap(summary: Summary) -> Any:
    """Draw the load of every expert of every layer / the layer's mean; one trace per view, the first one visible."""
    views = [(label, times_mean(load_LE, 0.0), load_LE) for label, load_LE in heatmap_views(summary)]
    top = max(2.0, float(np.quantile(views[0][1], 0.995)))  # one scale for all views, so that they compare
    gap = 1 if max(summary.load_LE.shape) <= 64 else 0  # pixels between cells
    figure = plotly_figures().Figure()
    for i, (label, ratio_LE, load_LE) in enumerate(views):
        figure.add_heatmap(
            z=ratio_LE.astype(np.float32),
            customdata=load_LE.astype(np.int32 if load_LE.max() < 1 << 31 else np.float64),
            y=summary.layer_ids.astype(np.int32),
            visible=i == 0,
            zmin=0.0,
            zmax=top,
            colorscale="Cividis",
            xgap=gap,
            ygap=gap,
            colorbar={
                "title": {"text": "× layer mean"},
                "orientation": "h",
                "thickness": 10,
                "y": 1.0,
                "yanchor": "bottom",
            },
            hovertemplate=(
                "layer %{y}, expert %{x}<br>%{z:.2f} times the layer’s mean load"
                f"<br>%{{customdata:,}} token-slots, {label}<extra></extra>"
            ),
        )
    figure.update_layout(
        height=int(np.clip(170 + 14 * len(summary.layer_ids), 240, 900)),
        xaxis={"title": {"text": "expert", "standoff": 26}, "showgrid": False, "zeroline": False},
        yaxis={"title": {"text": "layer"}, "autorange": "reversed", "showgrid": False, "zeroline": False},
    )
    if len(summary.layer_ids) <= 12:
        figure.update_yaxes(tickmode="array", tickvals=summary.layer_ids.tolist())
    return figure


def skew_by_micro_batch(summary: Summary) -> Any:
    """Draw rank skew over micro-batches: the mean over layers as a line, from least to most skewed layer as a band."""
    figure = plotly_figures().Figure()
    kept = evenly_chosen(len(summary.step_M), MAX_POINTS)
    several = len(summary.steps) > 1
    for i, (ranks, found) in reversed(list(enumerate(summary.skews.items()))):
        skew_ML, name = found.skew_ML[kept], summary.ranks_name(ranks)
        band(figure, kept, skew_ML.min(axis=1), skew_ML.max(axis=1), PALETTE[i % len(PALETTE)], name)
        hover = f"{name}, micro-batch %{{x}}{', step %{customdata}' if several else ''}: mean rank skew %{{y:.2f}}"
        line(figure, kept, skew_ML.mean(axis=1), PALETTE[i % len(PALETTE)], name, hover)
        figure.data[-1].customdata = summary.step_M[kept]
    figure.update_layout(
        height=400,
        xaxis={"title": {"text": "micro-batch, in order of the recording"}},
        yaxis={"title": {"text": "rank skew (max / mean)"}, "rangemode": "normal"},
        legend={"traceorder": "reversed"},
    )
    return figure


def cosine_by_layer(stability: Stability, layer_ids: ndarray) -> Any:
    """Draw, per layer, the cosine of each micro-batch's load to the step's: the mean as a dot, the range as a bar."""
    mean_L, low_L, high_L = stability.cosine_mean_L, stability.cosine_low_L, stability.cosine_high_L
    figure = plotly_figures().Figure()
    figure.add_scatter(
        x=layer_ids,
        y=mean_L,
        mode="markers",
        name="mean, with lowest and highest micro-batch",
        marker={"color": PALETTE[0], "size": 9},
        error_y={"array": high_L - mean_L, "arrayminus": mean_L - low_L, "thickness": 1.5, "width": 4},
        customdata=low_L,
        hovertemplate="layer %{x}: mean cosine %{y:.3f}, lowest %{customdata:.3f}<extra></extra>",
    )
    figure.add_scatter(
        x=[layer_ids[0] - 0.5, layer_ids[-1] + 0.5],
        y=[stability.chance] * 2,
        mode="lines",
        name="chance alone",
        line={"color": PALETTE[1], "dash": "dash", "width": 2},
        hovertemplate="chance alone: about %{y:.3f}<extra></extra>",
    )
    figure.update_layout(
        height=320,
        xaxis={"title": {"text": "layer"}},
        yaxis={"title": {"text": "cosine to the step"}, "range": [min(0.9, float(low_L.min()) - 0.02), 1.01]},
    )
    if len(layer_ids) <= 12:
        figure.update_xaxes(tickmode="array", tickvals=layer_ids.tolist())
    return figure


def line(
    figure: Any, x: Any, y: Any, colour: str, name: str, hover: str, *, dash: str = "solid", yaxis: str = "y"
) -> None:
    """Add a curve; where it has one point only, a mark."""
    mode = "lines" if len(x) > 1 else "markers"
    figure.add_scatter(
        x=x,
        y=y,
        mode=mode,
        name=name,
        yaxis=yaxis,
        legendgroup=name,
        line={"color": colour, "width": 2, "dash": dash},
        marker={"color": colour, "size": 9},
        hovertemplate=hover + "<extra></extra>",
    )


def plain_name(name: str) -> str:
    """Make a name safe for plotly, which reads some HTML in names."""
    return escape(name.encode("utf-8", "replace").decode()).replace("%", "")


def band(figure: Any, x: Any, low: Any, high: Any, colour: str, name: str, yaxis: str = "y") -> None:
    """Add a filled band between two curves; it has no legend entry of its own and follows that of `name`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "legendgroup": name}
    edge["yaxis"] = yaxis
    figure.add_scatter(x=x, y=low, **edge)
    figure.add_scatter(x=x, y=high, fill="tonexty", fillcolor=f"rgba({red},{green},{blue},0.16)", **edge)
