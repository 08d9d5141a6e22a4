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

    def of(self, metrics: Metrics) -> list[float | None]:
        """Return one number per row."""
        return metrics.column(self.key, self.part)


Axis = Literal["linear", "from zero", "share", "log"]


class Panel(NamedTuple):
    """Curves that share a unit; curves without numbers are left out, and so are panels without curves."""

    title: str
    axis: Axis
    curves: tuple[Curve, ...]


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

PANELS = {
    section: tuple(
        Panel(title, axis, tuple(curve for at, name, _, curve in CURVES if (at, name) == (section, title)))
        for title, axis in dict.fromkeys((title, axis) for at, title, axis, _ in CURVES if at == section)
    )
    for section in TITLES
}
"""By section."""


def has_any(metrics: Metrics, panels: Sequence[Panel]) -> bool:
    """Return whether there is anything to draw."""
    return any(_is_drawn(curve, panel, metrics) for panel in panels for curve in panel.curves)


def run_panels(metrics: Metrics, panels: Sequence[Panel]) -> Any:
    """Draw panels above one another over RL steps; `has_any` says whether there are any."""
    return _draw_panels([(panel, [(curve, metrics) for curve in panel.curves]) for panel in panels], GAP_PIXELS)


def compared_panels(runs: Sequence[tuple[str, Metrics]], panels: Sequence[Panel]) -> Any:
    """Draw the first two curves of panels: a colour for each run, dashes of its own for each curve.

    runs    (name, metrics); at least one of them has something to draw
    """
    drawn: list[tuple[Panel, list[tuple[Curve, Metrics]]]] = [(panel, []) for panel in panels]
    for panel, curves in drawn:
        for number, (run, metrics) in enumerate(runs):
            for place, curve in enumerate(panel.curves[:2]):
                name, dash = f"{plain_name(run)}: {curve.name}", (2 * place + number) % len(DASHES)
                curves.append((curve._replace(name=name, spread="", colour=number, dash=dash), metrics))
    return _draw_panels(drawn, GAP_PIXELS + 76)


def _draw_panels(panels: Sequence[tuple[Panel, Sequence[tuple[Curve, Metrics]]]], gap: int) -> Any:
    """Draw (panel, its curves with the run of each) above one another; each panel has a legend of its own."""
    figure = plotly_figures().Figure()
    kept = [(panel, [item for item in curves if _is_drawn(item[0], panel, item[1])]) for panel, curves in panels]
    shown = [(panel, curves) for panel, curves in kept if curves]
    height = len(shown) * PANEL_PIXELS + (len(shown) - 1) * gap
    for i, (panel, curves) in enumerate(shown):
        number = "" if i == 0 else str(i + 1)
        for curve, metrics in curves:
            _draw(figure, metrics, curve, panel, number)
        top = 1 - i * (PANEL_PIXELS + gap) / height
        axis = {"title": {"text": panel.title}, "domain": [max(0.0, top - PANEL_PIXELS / height), top]}
        axis |= _axis_settings(panel, [value for curve, metrics in curves for value in curve.of(metrics)])
        figure.update_layout({f"yaxis{number}": axis, f"legend{number}": {"y": top + 4 / height}})
    few = max((len(metrics.rows) for _, curves in shown for _, metrics in curves), default=0) <= 10
    xaxis = {"title": {"text": "RL step"}, "anchor": "y" if len(shown) == 1 else f"y{len(shown)}"}
    figure.update_layout(height=height + 110, xaxis=xaxis | ({"dtick": 1} if few else {}))  # no marks between steps
    return figure


def _axis_settings(panel: Panel, values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if panel.axis == "log":
        decades = [log10(value) for value in known if value > 0]
        step = max(1, ceil((max(decades) - min(decades)) / 5))  # few ticks
        return {"type": "log", "exponentformat": "power", "dtick": step}
    if panel.axis == "share":
        largest = max(known)
        form = {"tickformat": ".0%" if largest >= 0.05 else ".2%", "rangemode": "tozero"}
        return form if largest else form | {"range": [0.0, 0.01]}
    return {"rangemode": "tozero"} if panel.axis == "from zero" else {}


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


def _draw(figure: Any, metrics: Metrics, curve: Curve, panel: Panel, number: str) -> None:
    values, colour, axis = curve.of(metrics), PALETTE[curve.colour], f"y{number}"
    if panel.axis == "log":
        values = [value if value is not None and value > 0 else None for value in values]
    if curve.spread:
        spread = metrics.column(curve.spread)
        both = [(v, s) for v, s in zip(values, spread, strict=True) if v is not None and s is not None]
        if len(both) == len(values):  # a band with holes would be filled across them
            band(figure, metrics.steps, [v - s for v, s in both], [v + s for v, s in both], colour, curve.name, axis)
    hover = f"step %{{x}}: {curve.name} %{{y:{curve.form}}}"
    line(figure, metrics.steps, values, colour, curve.name, hover, dash=DASHES[curve.dash], yaxis=axis)
    figure.data[-1].legend = f"legend{number}"
    if None in values:  # a number between two gaps would be no line
        figure.data[-1].update(mode="lines+markers", marker={"size": 5})
    if curve.points:
        figure.data[-1].update(mode="markers", marker={"symbol": "diamond", "size": 10})


def _is_drawn(curve: Curve, panel: Panel, metrics: Metrics) -> bool:
    return any(panel.axis != "log" or value > 0 for value in metrics.known(curve.key, curve.part))
