"""The figures about one or several training runs: numbers of each RL step, as panels above one another."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log10
from typing import Any, Literal, NamedTuple

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.html.route_figures import DASHES, PALETTE, band, line, plain_name, plotly_figures

PANEL_PIXELS = 190
GAP_PIXELS = 44
"""Between panels: room for the legend of the lower one in one line."""


class Curve(NamedTuple):
    """One number of metrics.jsonl over RL steps.

    form      how plotly prints it, in d3's notation
    colour    index into the palette
    part      key inside of the table `key`; "": `key` is the number
    spread    key of a standard deviation, drawn as a band around it
    points    draw marks without a line, for numbers that few steps have
    """

    key: str
    name: str
    form: str = ".3f"
    colour: int = 0
    dash: int = 0
    part: str = ""
    spread: str = ""
    points: bool = False


Axis = Literal["linear", "from zero", "share", "log"]
Drawn = list[tuple[Curve, Metrics]]
"""Curves, each with the metrics of its run."""

TITLES = {
    "learning": "Learning",
    "balance": "Balance in training",
    "mismatch": "Mismatch of rollout and trainer",
    "values": "Value model",
    "update": "Policy update",
    "idle": "Idle share of the rollout batch",
}
"""Of the sections of curves, in the order of pages."""

CURVES: tuple[tuple[str, str, Axis, Curve], ...] = (
    ("learning", "reward", "linear", Curve("reward", "reward", spread="reward_std")),
    ("learning", "reward", "linear", Curve("evaluation", "evaluation", colour=2, part="reward", points=True)),
    ("learning", "response (tokens)", "from zero", Curve("response_length", "mean length", ",.0f", 1)),
    ("learning", "response (tokens)", "from zero", Curve("response_length_p95", "95th percentile", ",.0f", 1, 1)),
    ("learning", "response (tokens)", "from zero", Curve("response_length_max", "longest", ",.0f", 1, 2)),
    ("learning", "share of responses", "share", Curve("unfinished_share", "unfinished", ".1%", 3)),
    ("learning", "share of responses", "share", Curve("cut_share", "truncated, of those that ended", ".1%", 4, 1)),
    ("balance", "rank skew (max / mean)", "linear", Curve("rank_skew", "static layout", colour=1)),
    ("balance", "rank skew (max / mean)", "linear", Curve("planned_skew", "as planned")),
    ("balance", "rank skew (max / mean)", "linear", Curve("plan_bound", "bound of the plan", colour=6, dash=2)),
    ("mismatch", "divergence", "log", Curve("k3_kl", "k3 of rollout and trainer", ".2e")),
    ("mismatch", "divergence", "log", Curve("probability_difference", "mean difference of probabilities", ".2e", 1, 1)),
    ("mismatch", "share of router choices", "share", Curve("router_disagreement", "router disagreement", ".2%", 2)),
    ("values", "share explained", "linear", Curve("explained_variance", "explained variance", ".2f")),
    ("values", "value loss", "from zero", Curve("value_loss", "value loss", ".4f", 1)),
    ("update", "entropy (nats)", "from zero", Curve("entropy", "entropy")),
    ("update", "share of tokens", "share", Curve("clip_fraction", "clipped", ".2%", 1)),
    ("update", "share of tokens", "share", Curve("masked_fraction", "masked by the correction", ".2%", 3, 1)),
    ("update", "gradient norm", "from zero", Curve("grad_norm", "gradient norm", colour=2)),
    ("update", "divergence", "log", Curve("reference_kl", "from the reference policy", ".2e", 4)),
    ("idle", "idle share of the batch", "share", Curve("idle_share", "idle share of the rollout batch", ".1%", 1)),
)
"""Section, title and axis of the panel, curve."""


def section_figures(runs: Sequence[tuple[str, Metrics]]) -> dict[str, Any]:
    """Return the figure of each section that has numbers: curves over RL steps, those of one unit in a panel.

    runs    (name, metrics). Of several runs a panel has its first two curves: a colour per run, dashes by run and curve
    """
    figures = {}
    for section in TITLES:
        panels: dict[tuple[str, Axis], list[Curve]] = {}
        for at, title, axis, curve in CURVES:
            if at == section:
                panels.setdefault((title, axis), []).append(curve)
        drawn = {key: _with_numbers(curves, runs, key[1]) for key, curves in panels.items()}
        if any(drawn.values()):
            figures[section] = _draw_panels(drawn, GAP_PIXELS + 76 * (len(runs) > 1))
    return figures


def _with_numbers(curves: Sequence[Curve], runs: Sequence[tuple[str, Metrics]], axis: Axis) -> Drawn:
    """Return the curves of a panel that have numbers; of several runs in colours and dashes of their own."""
    found = [(curve, metrics) for curve in curves for _, metrics in runs]
    if len(runs) > 1:
        found = [
            (curve._replace(name=f"{plain_name(run)}: {curve.name}", spread="", colour=number, dash=dash), metrics)
            for number, (run, metrics) in enumerate(runs)
            for place, curve in enumerate(curves[:2])
            for dash in ((2 * place + number) % len(DASHES),)
        ]
    return [
        (curve, metrics)
        for curve, metrics in found
        if any(axis != "log" or value > 0 for value in metrics.known(curve.key, curve.part))
    ]


def _draw_panels(panels: dict[tuple[str, Axis], Drawn], gap: int) -> Any:
    """Draw the panels that have curves above one another, each with a legend of its own."""
    figure = plotly_figures().Figure()
    shown = {key: drawn for key, drawn in panels.items() if drawn}
    height = len(shown) * PANEL_PIXELS + (len(shown) - 1) * gap
    for i, ((title, kind), drawn) in enumerate(shown.items()):
        number = "" if i == 0 else str(i + 1)
        values = [value for curve, metrics in drawn for value in _draw(figure, metrics, curve, kind, number)]
        top = 1 - i * (PANEL_PIXELS + gap) / height
        axis = {"title": {"text": title}, "domain": [max(0.0, top - PANEL_PIXELS / height), top]}
        axis |= _axis_settings(kind, [value for value in values if value is not None])
        figure.update_layout({f"yaxis{number}": axis, f"legend{number}": {"y": top + 4 / height}})
    few = max((len(metrics.rows) for drawn in shown.values() for _, metrics in drawn), default=0) <= 10
    xaxis = {"title": {"text": "RL step"}, "anchor": "y" if len(shown) == 1 else f"y{len(shown)}"}
    figure.update_layout(height=height + 110, xaxis=xaxis | ({"dtick": 1} if few else {}))  # no marks between steps
    return figure


def _axis_settings(axis: Axis, values: Sequence[float]) -> dict[str, Any]:
    if axis == "log":
        decades = log10(max(values)) - log10(min(values))
        return {"type": "log", "exponentformat": "power", "dtick": max(1, ceil(decades / 5))}  # few ticks
    if axis == "share":
        largest = max(values)
        form = {"tickformat": ".0%" if largest >= 0.05 else ".2%", "rangemode": "tozero"}
        return form if largest else form | {"range": [0.0, 0.01]}
    return {"rangemode": "tozero"} if axis == "from zero" else {}


def stage_seconds(metrics: Metrics) -> Any:
    """Draw the seconds of each step as bars stacked by stage."""
    figure = plotly_figures().Figure()
    for i, (stage, seconds) in enumerate(metrics.seconds().items()):
        name = plain_name(stage)
        figure.add_bar(
            x=metrics.steps,
            y=seconds,
            name=name,
            marker={"color": PALETTE[i % len(PALETTE)], "pattern": {"shape": "/" if i >= len(PALETTE) else ""}},
            hovertemplate=f"step %{{x}}: {name} %{{y:.2f}} s<extra></extra>",
        )
    figure.update_layout(
        height=360, barmode="stack", bargap=0.15, xaxis_title_text="RL step", yaxis_title_text="seconds"
    )
    return figure


def _draw(figure: Any, metrics: Metrics, curve: Curve, kind: Axis, number: str) -> list[float | None]:
    """Add a curve to a panel, and return its values; a logarithmic axis has no place for 0 and less."""
    values, colour, axis = metrics.column(curve.key, curve.part), PALETTE[curve.colour], f"y{number}"
    if kind == "log":
        values = [value if value is not None and value > 0 else None for value in values]
    if curve.spread:
        spread = metrics.column(curve.spread)
        both = [(v, s) for v, s in zip(values, spread, strict=True) if v is not None and s is not None]
        if len(both) == len(values):  # a band with holes would be filled across them
            band(figure, metrics.steps, [v - s for v, s in both], [v + s for v, s in both], colour, curve.name, axis)
    hover = f"step %{{x}}: {curve.name} %{{y:{curve.form}}}"
    line(figure, metrics.steps, values, colour, curve.name, hover, dash=DASHES[curve.dash], yaxis=axis)
    figure.data[-1].legend = f"legend{number}"
    if None in values:  # a lone number between two gaps would not show as a line
        figure.data[-1].update(mode="lines+markers", marker={"size": 5})
    if curve.points:
        figure.data[-1].update(mode="markers", marker={"symbol": "diamond", "size": 10})
    return values
