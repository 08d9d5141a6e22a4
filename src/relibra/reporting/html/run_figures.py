"""The figures about a training run: numbers of each RL step, as panels above one another; colours as in `pictures`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, log10
from typing import Any, Literal

from relibra.reporting.data.metrics import Metrics
from relibra.reporting.html.route_figures import DASHES, PALETTE, band, line, plotly_figures

PANEL_PIXELS = 190
_GAP_PIXELS = 34


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number of metrics.jsonl over RL steps.

    part      key inside of the table `key`; empty: `key` is the number
    spread    key of a standard deviation, drawn as a band around it
    form      how plotly prints it, in d3's notation
    colour    place in the palette
    points    draw marks and no line: numbers of few steps
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
        return metrics.nested(self.key, self.part) if self.part else metrics.column(self.key)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share a unit; one that no row has is left out, and a panel without any too."""

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
            Curve(key="cut_share", name="cut, of those that ended", form=".1%", colour=4, dash=1),
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
            Curve(key="k3_kl", name="k3 of sampler and trainer", form=".2e"),
            Curve(key="probability_difference", name="difference of probabilities", form=".2e", colour=1, dash=1),
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
        title="share of places",
        axis="share",
        curves=(Curve(key="idle_share", name="idle places in rollout", form=".1%", colour=1),),
    ),
)


def has_any(metrics: Metrics, panels: Sequence[Panel]) -> bool:
    """Say whether there is anything to draw."""
    return any(_is_drawn(curve, panel, metrics) for panel in panels for curve in panel.curves)


def step_panels(metrics: Metrics, panels: Sequence[Panel]) -> Any:
    """Draw panels above one another over RL steps; `has_any` says whether there are any."""
    figure = plotly_figures().Figure()
    shown = [panel for panel in panels if has_any(metrics, [panel])]
    height = len(shown) * PANEL_PIXELS + (len(shown) - 1) * _GAP_PIXELS
    for i, panel in enumerate(shown):
        axis = "y" if i == 0 else f"y{i + 1}"
        for curve in panel.curves:
            if _is_drawn(curve, panel, metrics):
                _draw(figure, metrics, curve, panel, axis)
        top = 1 - i * (PANEL_PIXELS + _GAP_PIXELS) / height
        setting: dict[str, Any] = {
            "title": {"text": panel.title},
            "domain": [max(0.0, top - PANEL_PIXELS / height), top],
        }
        if panel.axis == "log":
            setting |= {"type": "log", "exponentformat": "power", "dtick": _decades(metrics, panel)}
        elif panel.axis == "share":
            largest = _largest(metrics, panel)
            setting |= {"tickformat": ".0%" if largest >= 0.05 else ".2%", "rangemode": "tozero"}
            if not largest:
                setting["range"] = [0.0, 0.01]
        elif panel.axis == "from zero":
            setting["rangemode"] = "tozero"
        figure.update_layout({axis.replace("y", "yaxis"): setting})
    last = "y" if len(shown) == 1 else f"y{len(shown)}"
    figure.update_layout(height=height + 110, xaxis={"title": {"text": "RL step"}, "anchor": last})
    return figure


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


def _draw(figure: Any, metrics: Metrics, curve: Curve, panel: Panel, axis: str) -> None:
    values, colour = curve.of(metrics), PALETTE[curve.colour]
    if panel.axis == "log":
        values = [value if value is not None and value > 0 else None for value in values]
    if curve.spread:
        spread = metrics.column(curve.spread)
        both = [(v, s) for v, s in zip(values, spread, strict=True) if v is not None and s is not None]
        if len(both) == len(values):  # a band with holes would be filled across them
            band(figure, metrics.steps, [v - s for v, s in both], [v + s for v, s in both], colour, curve.name, axis)
    hover = f"step %{{x}}: {curve.name} %{{y:{curve.form}}}"
    line(figure, metrics.steps, values, colour, curve.name, hover, dash=DASHES[curve.dash], yaxis=axis)
    if _stands_alone(values):  # a number between two gaps would be no line
        figure.data[-1].update(mode="lines+markers", marker={"size": 5})
    if curve.points:
        figure.data[-1].update(mode="markers", marker={"symbol": "diamond", "size": 10})


def _is_drawn(curve: Curve, panel: Panel, metrics: Metrics) -> bool:
    return any(value is not None and (panel.axis != "log" or value > 0) for value in curve.of(metrics))


def _stands_alone(values: Sequence[float | None]) -> bool:
    """Say whether any number has no neighbour."""
    beside = [None, *values, None]
    return any(
        value is not None and before is None and after is None
        for before, value, after in zip(beside, values, beside[2:], strict=False)
    )


def _largest(metrics: Metrics, panel: Panel) -> float:
    return max((value for curve in panel.curves for value in curve.of(metrics) if value is not None), default=0.0)


def _decades(metrics: Metrics, panel: Panel) -> int:
    """Return how many decades lie between ticks of a logarithmic axis, so that there are few."""
    found = [log10(value) for curve in panel.curves for value in curve.of(metrics) if value is not None and value > 0]
    return max(1, ceil((max(found) - min(found)) / 5))


def compared_panels(runs: Sequence[tuple[str, Metrics]], panels: Sequence[Panel]) -> Any:
    """Draw the first two curves of panels above one another: a colour for each run, dashes of its own for each curve.

    runs    (name, metrics); at least one of them has something to draw
    """
    figure = plotly_figures().Figure()
    shown = [panel for panel in panels if any(has_any(metrics, [panel]) for _, metrics in runs)]
    height = len(shown) * PANEL_PIXELS + (len(shown) - 1) * _GAP_PIXELS
    for i, panel in enumerate(shown):
        axis = "y" if i == 0 else f"y{i + 1}"
        for number, (name, metrics) in enumerate(runs):
            for place, curve in enumerate(panel.curves[:2]):
                if _is_drawn(curve, panel, metrics):
                    full_name, dash = f"{_plain(name)}: {curve.name}", 2 * place + number
                    own = replace(curve, name=full_name, spread="", colour=number, dash=dash % len(DASHES))
                    _draw(figure, metrics, own, panel, axis)
        top = 1 - i * (PANEL_PIXELS + _GAP_PIXELS) / height
        setting: dict[str, Any] = {
            "title": {"text": panel.title},
            "domain": [max(0.0, top - PANEL_PIXELS / height), top],
        }
        setting |= {"log": {"type": "log"}, "share": {"tickformat": ".1%", "rangemode": "tozero"}}.get(panel.axis, {})
        setting |= {"rangemode": "tozero"} if panel.axis == "from zero" else {}
        figure.update_layout({axis.replace("y", "yaxis"): setting})
    last = "y" if len(shown) == 1 else f"y{len(shown)}"
    figure.update_layout(height=height + 150, xaxis={"title": {"text": "RL step"}, "anchor": last})
    return figure


def _plain(name: str) -> str:
    """Make a name safe for plotly, which reads some HTML in names."""
    return escape(name.encode("utf-8", "replace").decode()).replace("%", "")
