"""The figures about one or several training runs: numbers of each RL step, as panels above one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, log10
from typing import Any, Literal

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.html.route_figures import DASHES, PALETTE, band, line, plotly_figures

PANEL_PIXELS = 190
GAP_PIXELS = 44
"""Between panels: room for the legend of the lower one in one line."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number of metrics.jsonl over RL steps.

    part      key inside of the table `key`; "": `key` is the number
    spread    key of a standard deviation, drawn as a band around it
    form      how plotly prints it, in d3's notation
    colour    index into the palette
    points    draw marks without a line, for numbers that few steps have
    """

    key: str
    name: str
    part: str = ""
    spread: str = ""
    form: str = ".3f"
    colour: int = 0
    dash: int = 0
    points: bool = False

    def of(self, metrics: Metrics) -> list[float | None]:
        """Return one number per row."""
        return metrics.column(self.key, self.part)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share a unit; curves without numbers are left out, and so are panels without curves."""

    title: str
    curves: tuple[Curve, ...]
    axis: Literal["linear", "from zero", "share", "log"] = "linear"


LEARNING = (
    Panel(
        title="reward",
        curves=(
            Curve(key="reward", name="reward", spread="reward_std"),
            Curve(key="evaluation", part="reward", name="evaluation", colour=2, points=True),
        ),
    ),
    Panel(
        title="response (tokens)",
        axis="from zero",
        curves=(
            Curve(key="response_length", name="mean length", form=",.0f", colour=1),
            Curve(key="response_length_p95", name="95th percentile", form=",.0f", colour=1, dash=1),
            Curve(key="response_length_max", name="longest", form=",.0f", colour=1, dash=2),
        ),
    ),
    Panel(
        title="share of responses",
        axis="share",
        curves=(
            Curve(key="unfinished_share", name="unfinished", form=".1%", colour=3),
            Curve(key="cut_share", name="truncated, of those that ended", form=".1%", colour=4, dash=1),
        ),
    ),
)
BALANCE = (
    Panel(
        title="rank skew (max / mean)",
        curves=(
            Curve(key="rank_skew", name="static layout", colour=1),
            Curve(key="planned_skew", name="as planned", colour=0),
            Curve(key="plan_bound", name="bound of the plan", colour=6, dash=2),
        ),
    ),
)
MISMATCH = (
    Panel(
        title="divergence",
        axis="log",
        curves=(
            Curve(key="k3_kl", name="k3 of rollout and trainer", form=".2e"),
            Curve(key="probability_difference", name="mean difference of probabilities", form=".2e", colour=1, dash=1),
        ),
    ),
    Panel(
        title="share of router choices",
        axis="share",
        curves=(Curve(key="router_disagreement", name="router disagreement", form=".2%", colour=2),),
    ),
)
VALUES = (
    Panel(title="share explained", curves=(Curve(key="explained_variance", name="explained variance", form=".2f"),)),
    Panel(
        title="value loss", axis="from zero", curves=(Curve(key="value_loss", name="value loss", form=".4f", colour=1),)
    ),
)
UPDATE = (
    Panel(title="entropy (nats)", axis="from zero", curves=(Curve(key="entropy", name="entropy"),)),
    Panel(
        title="share of tokens",
        axis="share",
        curves=(
            Curve(key="clip_fraction", name="clipped", form=".2%", colour=1),
            Curve(key="masked_fraction", name="masked by the correction", form=".2%", colour=3, dash=1),
        ),
    ),
    Panel(title="gradient norm", axis="from zero", curves=(Curve(key="grad_norm", name="gradient norm", colour=2),)),
    Panel(
        title="divergence",
        axis="log",
        curves=(Curve(key="reference_kl", name="from the reference policy", form=".2e", colour=4),),
    ),
)
IDLE = (
    Panel(
        title="idle share of the batch",
        axis="share",
        curves=(Curve(key="idle_share", name="idle share of the rollout batch", form=".1%", colour=1),),
    ),
)


def has_any(metrics: Metrics, panels: Sequence[Panel]) -> bool:
    """Return whether there is anything to draw."""
    return any(_is_drawn(curve, panel, metrics) for panel in panels for curve in panel.curves)


def run_panels(metrics: Metrics, panels: Sequence[Panel]) -> Any:
    """Draw panels above one another over RL steps; `has_any` says whether there are any."""
    drawn = [(panel, [(curve, metrics) for curve in panel.curves]) for panel in panels]
    return _draw_panels(drawn, GAP_PIXELS)


def compared_panels(runs: Sequence[tuple[str, Metrics]], panels: Sequence[Panel]) -> Any:
    """Draw the first two curves of panels: a colour for each run, dashes of its own for each curve.

    runs    (name, metrics); at least one of them has something to draw
    """

    def of_run(curve: Curve, place: int, number: int, name: str) -> Curve:
        dash = (2 * place + number) % len(DASHES)
        return replace(curve, name=f"{_plain(name)}: {curve.name}", spread="", colour=number, dash=dash)

    drawn = [
        (
            panel,
            [
                (of_run(curve, place, number, name), metrics)
                for number, (name, metrics) in enumerate(runs)
                for place, curve in enumerate(panel.curves[:2])
            ],
        )
        for panel in panels
    ]
    return _draw_panels(drawn, GAP_PIXELS + 76)


def _draw_panels(panels: Sequence[tuple[Panel, Sequence[tuple[Curve, Metrics]]]], gap: int) -> Any:
    """Draw (panel, its curves with the run of each) above one another; each panel has a legend of its own."""
    figure = plotly_figures().Figure()
    shown = [
        (panel, drawn)
        for panel, curves in panels
        if (drawn := [(curve, metrics) for curve, metrics in curves if _is_drawn(curve, panel, metrics)])
    ]
    height = len(shown) * PANEL_PIXELS + (len(shown) - 1) * gap
    for i, (panel, curves) in enumerate(shown):
        number = "" if i == 0 else str(i + 1)
        for curve, metrics in curves:
            _draw(figure, metrics, curve, panel, number)
        top = 1 - i * (PANEL_PIXELS + gap) / height
        axis = {"title": {"text": panel.title}, "domain": [max(0.0, top - PANEL_PIXELS / height), top]}
        axis |= _axis_settings(panel, [value for curve, metrics in curves for value in curve.of(metrics)])
        figure.update_layout({f"yaxis{number}": axis, f"legend{number}": {"y": top + 4 / height}})
    bottom = "y" if len(shown) == 1 else f"y{len(shown)}"
    few = max((len(metrics.rows) for _, curves in shown for _, metrics in curves), default=0) <= 10
    ticks = {"dtick": 1} if few else {}  # else plotly puts marks between steps
    figure.update_layout(height=height + 110, xaxis={"title": {"text": "RL step"}, "anchor": bottom, **ticks})
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
        name = _plain(stage)
        figure.add_bar(
            x=metrics.steps,
            y=seconds,
            name=name,
            marker={
                "color": PALETTE[i % len(PALETTE)],
                "line": {"width": 0},
                "pattern": {"shape": "/" if i >= len(PALETTE) else ""},  # more stages than colours
            },
            hovertemplate=f"step %{{x}}: {name} %{{y:.2f}} s<extra></extra>",
        )
    figure.update_layout(
        height=360,
        barmode="stack",
        bargap=0.15,
        xaxis={"title": {"text": "RL step"}},
        yaxis={"title": {"text": "seconds"}},
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
    if _has_lone_value(values):  # a number between two gaps would be no line
        figure.data[-1].update(mode="lines+markers", marker={"size": 5})
    if curve.points:
        figure.data[-1].update(mode="markers", marker={"symbol": "diamond", "size": 10})


def _is_drawn(curve: Curve, panel: Panel, metrics: Metrics) -> bool:
    return any(panel.axis != "log" or value > 0 for value in metrics.known(curve.key, curve.part))


def _has_lone_value(values: Sequence[float | None]) -> bool:
    """Return whether any number has no neighbour."""
    beside = [None, *values, None]
    return any(
        value is not None and before is None and after is None
        for before, value, after in zip(beside, values, beside[2:], strict=False)
    )


def _plain(name: str) -> str:
    """Make a name safe for plotly, which reads some HTML in names."""
    return escape(name.encode("utf-8", "replace").decode()).replace("%", "")
