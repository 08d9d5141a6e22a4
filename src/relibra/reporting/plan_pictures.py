"""The figures about a plan: rank loads before and after, what each lever bought, balancers side by side.

All of them show the token objective: loads are counted, not modelled. Colours as in `relibra.reporting.pictures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.comparison import ComparisonRow
from relibra.reporting.pictures import PALETTE, plotly_figures
from relibra.reporting.summary import evenly_chosen

MAX_VIEWS = 12
MAX_CELLS = 120_000
"""Cells of all heatmaps together: about 6 bytes each on the page."""
MAX_COLUMNS = 400


def heatmap_layers(before_MLR: Int64[ndarray, "M L R"], after_MLR: Int64[ndarray, "M L R"]) -> list[int]:
    """Return the layers (places on the layer axis) to show: the one that gains most first, then some of the others."""
    M, L, R = before_MLR.shape
    gain_L = (before_MLR.max(axis=2) - after_MLR.max(axis=2)).sum(axis=0)
    first = int(np.argmax(gain_L))
    room = MAX_CELLS // max(1, 2 * min(M, MAX_COLUMNS) * R) - 1
    others = evenly_chosen(L, min(MAX_VIEWS, room)) if room >= 1 else []
    return [first, *(layer for layer in others if layer != first)]


def rank_heatmaps(before_MLR: Int64[ndarray, "M L R"], after_MLR: Int64[ndarray, "M L R"], layer_ids: ndarray) -> Any:
    """Draw rank load / mean over micro-batches, before above after, on one scale; one view per layer shown.

    before_MLR, after_MLR   token-slots; their micro-batches may hold other samples
    """
    figure = plotly_figures().Figure()
    shown = evenly_chosen(len(before_MLR), MAX_COLUMNS)
    layers = heatmap_layers(before_MLR, after_MLR)
    for view, layer in enumerate(layers):
        for place, (name, load_MLR) in enumerate((("before", before_MLR), ("after", after_MLR))):
            figure.add_heatmap(
                z=np.round(_times_mean(load_MLR[shown, layer]).T, 2).astype(np.float32),
                x=np.array(shown, dtype=np.int32),
                visible=view == 0,
                meta=view,
                coloraxis="coloraxis",
                yaxis="y2" if place else "y",
                hovertemplate=(
                    f"layer {layer_ids[layer]}, {name}<br>micro-batch %{{x}}, rank %{{y}}: %{{z:.2f}} times the mean"
                    "<extra></extra>"
                ),
            )
    top = float(np.quantile(_times_mean(before_MLR[:, layers]).max(axis=-1), 0.99))
    rank_axis = {"autorange": "reversed", "showgrid": False, "zeroline": False}
    figure.update_layout(
        height=int(np.clip(190 + 2 * 7 * before_MLR.shape[2], 320, 1000)),
        coloraxis={
            "colorscale": "Cividis",
            "cmin": 0.0,
            "cmax": max(2.0, top),
            "colorbar": {
                "title": {"text": "× mean"},
                "orientation": "h",
                "thickness": 10,
                "y": 1.0,
                "yanchor": "bottom",
            },
        },
        xaxis={"title": {"text": "micro-batch"}, "anchor": "y2", "showgrid": False, "zeroline": False},
        yaxis={"title": {"text": "rank, before"}, "domain": [0.53, 1.0], **rank_axis},
        yaxis2={"title": {"text": "rank, after"}, "domain": [0.0, 0.47], **rank_axis},
    )
    return figure


def lever_waterfall(levers: Sequence[tuple[str, float]]) -> Any:
    """Draw the skew above 1 as the levers are pulled: where it starts, what each takes off, what stays, the bound.

    levers    as `relibra.planning.levers.lever_gaps` returns them
    """
    figure = plotly_figures().Figure()
    start, steps, bound = levers[0], levers[1:-1], levers[-1]
    before = [value for _, value in levers[:-2]]
    bars = [(start[0], 1.0, start[1], PALETTE[6], f"{start[1]:.3f}")]
    for (name, value), previous in zip(steps, before, strict=True):
        colour = PALETTE[2] if value <= previous else PALETTE[1]
        bars.append((name, min(previous, value), max(previous, value), colour, f"{value - previous:+.3f}"))
    bars.append(("the plan", 1.0, steps[-1][1], PALETTE[0], f"{steps[-1][1]:.3f}"))
    bars.append(("its bound", 1.0, bound[1], PALETTE[5], f"{bound[1]:.3f}"))
    for name, low, high, colour, text in bars:
        figure.add_bar(
            y=[name],
            x=[high - low],
            base=[low],
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            text=[text],
            textposition="outside",
            cliponaxis=False,
            showlegend=False,
            hovertemplate=f"{name}: {text}<extra></extra>",
        )
    span = max(high for _, _, high, _, _ in bars) - 1.0 or 1.0
    figure.update_layout(
        height=90 + 40 * len(bars),
        bargap=0.35,
        xaxis={"title": {"text": "skew; 1 is even"}, "range": [1.0, 1.0 + 1.18 * span]},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    return figure


def balancer_skews(rows: Sequence[ComparisonRow]) -> Any:
    """Draw the skew of each balancer that made a plan, lowest first, and its own bound."""
    figure = plotly_figures().Figure()
    made = sorted((row for row in rows if row.skew is not None), key=lambda row: (row.skew, row.balancer))
    places = list(range(len(made)))
    for place, row in zip(places, made, strict=True):
        figure.add_scatter(
            x=[row.bound, row.skew],
            y=[place, place],
            mode="lines",
            line={"color": PALETTE[6], "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    for name, symbol, colour, values in (
        ("bound of its homes, slots, schedule and scope", "line-ns-open", PALETTE[1], [row.bound for row in made]),
        ("skew", "circle", PALETTE[0], [row.skew for row in made]),
    ):
        figure.add_scatter(
            x=values,
            y=places,
            mode="markers+text" if name == "skew" else "markers",
            name=name,
            marker={"color": colour, "size": 12, "symbol": symbol, "line": {"width": 2, "color": colour}},
            text=[f"{value:.3f}" for value in values],
            textposition="middle right",
            customdata=[row.balancer for row in made],
            hovertemplate=f"%{{customdata}}: {name} %{{x:.3f}}<extra></extra>",
            cliponaxis=False,
        )
    span = max((row.skew or 1.0 for row in made), default=2.0) - 1.0 or 1.0
    figure.update_layout(
        height=110 + 27 * len(made),
        xaxis={
            "title": {"text": "skew; 1 is even"},
            "range": [1 - 0.03 * span, 1 + 1.2 * span],
        },
        yaxis={
            "tickvals": places,
            "ticktext": [_two_lines(row.balancer) for row in made],
            "range": [len(made) - 0.4, -0.6],
            "showgrid": False,
        },
    )
    return figure


def _two_lines(name: str) -> str:
    """Break a long set of levers, so that the names leave room for the figure on a phone."""
    head, plus, tail = name.rpartition("+")
    return name if len(name) <= 15 or not plus else f"{head}<br>+{tail}"


def _times_mean(load: Int64[ndarray, "*X R"]) -> Float64[ndarray, "*X R"]:
    mean = load.mean(axis=-1, keepdims=True)
    return np.divide(load, mean, out=np.ones(load.shape), where=mean > 0)
