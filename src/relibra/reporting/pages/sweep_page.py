"""The plot of a sweep: throughput over a varied setting, a line for each combination of the others; a PNG or a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from relibra.errors import ConfigError
from relibra.files import atomic_path, write_text
from relibra.reporting.html.page import render_page
from relibra.reporting.html.route_figures import PALETTE, plotly_figures

AXES = ("ranks", "micro_batch_tokens", "slots", "ranks_per_node", "pipeline_stages")
"""The axis is the first of these that varies; if none does, balancers are its categories."""
LOG_RANGE = 8
"""An axis is logarithmic if its largest number is at least this many times its smallest: ticks keep apart."""
VALUE, VALUE_NAME = "tokens_per_second_per_rank", "tokens per second and rank"
STATIC_VALUE = "static_tokens_per_second_per_rank"
"""The same of the static layout, on a row's machine and micro-batches."""
OF_PLANS = ("slots", "balancer")
"""Settings that the static layout does not depend on."""
STATIC, GREY = "static", "#8a8a8a"
"""Name and colour of the static layout, whose lines are dashed."""
KINDS = (".png", ".html")

Rows = Sequence[Mapping[str, Any]]


class SweepLines(NamedTuple):
    """What is drawn.

    lines    for each line by name, its values by position on the axis, rising
    axis     the setting along the axis
    """

    lines: dict[str, dict[Any, float]]
    axis: str

    @property
    def ticks(self) -> list[Any]:
        """All positions on the axis, rising; balancers in the order of the rows."""
        ticks = dict.fromkeys(tick for points in self.lines.values() for tick in points)
        return list(ticks) if self.axis == "balancer" else sorted(ticks)

    @property
    def scale(self) -> str:
        """The scale of the axis, as plotly names it."""
        if self.axis == "balancer":
            return "category"
        return "log" if 0 < LOG_RANGE * self.ticks[0] <= self.ticks[-1] else "linear"

    @property
    def axis_name(self) -> str:
        """The title of the axis."""
        return _words(self.axis) + " (logarithmic)" * (self.scale == "log")


def sweep_lines(rows: Rows, varied: Sequence[str]) -> SweepLines:
    """Return the lines of rows that differ in the settings `varied`, and those of the static layout beside them.

    >>> sweep_lines([{"ranks": 8, VALUE: 2.0, "balancer": "eplb"}], ["ranks", "balancer"]).lines
    {'eplb': {8: 2.0}}
    """
    axis = next((name for name in AXES if name in varied), "balancer")
    others = [name for name in varied if name not in (axis, "balancer")]
    lines: dict[str, dict[Any, float]] = {}
    static: dict[str, dict[Any, float]] = {}
    for row in rows:
        settings = {name: f"{row[name]} {_words(name)}" for name in others}
        name = "" if axis == "balancer" else ", ".join([*settings.values(), str(row["balancer"])])
        lines.setdefault(name, {})[row[axis]] = row[VALUE]
        if STATIC_VALUE in row:
            name = ", ".join([*(text for other, text in settings.items() if other not in OF_PLANS), STATIC])
            static.setdefault(name, {})[STATIC if axis == "balancer" else row[axis]] = row[STATIC_VALUE]
    if all(row["balancer"] != STATIC for row in rows):
        beside = {"": lines[""] | static[STATIC]} if axis == "balancer" and static else static
        lines |= beside
    rising = axis != "balancer"
    return SweepLines({name: dict(sorted(line.items())) if rising else line for name, line in lines.items()}, axis)


def check_plot(path: Path) -> None:
    """Check, before minutes of work, that the plot can be drawn.

    raises    ConfigError for another kind of file, or when the package that draws it is not installed
    """
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot {path} is neither a {KINDS[0]} nor a {KINDS[1]} file: name one of them")
    if path.suffix == ".html":
        plotly_figures()
    else:
        _matplotlib()


def draw_sweep(path: Path, rows: Rows, varied: Sequence[str], constant: Sequence[str], title: str) -> None:
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
        with atomic_path(path) as temporary:
            temporary.write_bytes(_png(sweep, title))


def _page(sweep: SweepLines, title: str, rows: Rows, varied: Sequence[str], constant: Sequence[str]) -> str:
    best = max(rows, key=lambda row: row[VALUE])
    names = list(varied) or ["ranks", "balancer"]
    best_settings = ", ".join(f"{_words(name)} {_cell(best, name)}" for name in names)
    return render_page(
        "sweep.html",
        title=title,
        kind="sweep",
        headline=f"Most {VALUE_NAME}, simulated: {best[VALUE]:,.0f} with {best_settings}.",
        facts=["docs/simulation.md describes the model of the machine"],
        value_name=VALUE_NAME,
        axis_name=sweep.axis_name,
        figure=_figure(sweep),
        constants=describe_constants(rows, [name for name in constant if name not in names]),
        header=[*map(_words, names), "tokens/s per rank", "/ static"],
        rows=[
            [*(_cell(row, name) for name in names), f"{row[VALUE]:,.0f}", f"{row[VALUE] / row[STATIC_VALUE]:.3f}"]
            for row in rows
        ],
        text_columns=[number for number, name in enumerate(names) if name == "balancer"],
    )


def describe_constants(rows: Rows, constant: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and values of the settings that all points share; one that follows from a varied setting is a range.

    >>> describe_constants([{"ranks": 8, "slots": 1, "balancer": "eplb"}], ["slots", "balancer"])
    [('slots', '1'), ('balancer', 'eplb')]
    """
    found = []
    for name in constant:
        values = sorted({row[name] for row in rows if row[name] is not None})
        ends = " to ".join(map(_text, values[:: max(1, len(values) - 1)])) or "of the given schedule"  # least, largest
        found.append((_words(name), ends))
    return found


def _cell(row: Mapping[str, Any], name: str) -> str:
    """Return a setting of a row; of a balancer also whether it kept the static layout."""
    fell_back = name == "balancer" and row.get("kept_static") and row[name] != STATIC
    return f"static (instead of {row[name]})" if fell_back else _text(row[name])


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _style(name: str, number: int) -> tuple[str, str]:
    """Return colour and dash of a line."""
    return (GREY, "dash") if STATIC in name.split(", ") else (PALETTE[number % len(PALETTE)], "solid")


def _matplotlib() -> Any:
    """Return matplotlib's figure module; raises ConfigError when it is not installed."""
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "a .png is drawn with matplotlib, which is not installed: in the checkout, pip install -e '.[report]', or "
            "name an .html"
        ) from error


def _png(sweep: SweepLines, title: str) -> bytes:
    figure = _matplotlib().Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(sweep.lines.items()):
        colour, dash = _style(name, number)
        style = "--" if dash == "dash" else "-"
        axes.plot(list(points), list(points.values()), style, marker="o", color=colour, label=name)
    scale = "log" if sweep.scale == "log" else "linear"
    axes.set(title=title, xlabel=sweep.axis_name, ylabel=VALUE_NAME, xscale=scale)
    axes.set_xticks(sweep.ticks, [_text(tick) for tick in sweep.ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    if any(sweep.lines):
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _figure(sweep: SweepLines) -> Any:
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
    ticks = {"tickmode": "array", "tickvals": sweep.ticks, "ticktext": list(map(_text, sweep.ticks))}
    figure.update_layout(
        height=440,
        showlegend=any(sweep.lines),
        xaxis={"title": {"text": sweep.axis_name}, "type": sweep.scale, **ticks},
        yaxis={"title": {"text": VALUE_NAME}, "rangemode": "tozero"},
    )
    return figure
