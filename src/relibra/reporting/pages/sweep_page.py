"""One picture of a sweep: throughput over what was varied, a line for each of the rest; PNG or a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import relibra
from relibra.errors import ConfigError
from relibra.files import atomic_path, write_text
from relibra.reporting.html.html import paragraph, plot, section, table
from relibra.reporting.html.html_page import html_page
from relibra.reporting.html.route_figures import PALETTE, plotly_figures

KINDS = (".png", ".html")
_NUMBERS = ("ranks", "micro_batch_tokens", "slots", "ranks_per_node", "pipeline_stages")
"""What may be the axis, in this order."""
WIDE = 8
"""Numbers that reach from one to so many times as much stand on a logarithmic axis, so that ticks keep apart."""

VALUE = "tokens_per_second_per_rank_without_relocation"
VALUE_NAME = "tokens per second and rank, without relocation"
LEFT_OUT = "The moves of experts before the first step are left out, since they are paid once."

Lines = dict[str, tuple[list[Any], list[float]]]
"""Places on the axis and values of each line, by its name."""


class Sweep(NamedTuple):
    """What is drawn.

    axis     the setting along the axis; `log` says how numbers stand on it
    """

    lines: Lines
    axis: str
    title: str

    @property
    def places(self) -> list[Any]:
        """All places on the axis, in rising order."""
        return sorted({place for places, _ in self.lines.values() for place in places})

    @property
    def log(self) -> bool:
        """Tell whether the axis is logarithmic."""
        return self.axis != "balancer" and 0 < WIDE * self.places[0] <= self.places[-1]

    @property
    def axis_name(self) -> str:
        """What stands at the axis."""
        return _words(self.axis) + " (logarithmic)" * self.log


def check_plot(path: Path) -> None:
    """Refuse, before minutes of work, what could not be drawn.

    raises    ConfigError for another kind of file, or when the package that draws it is not installed
    """
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot {path} is neither a {KINDS[0]} nor a {KINDS[1]} file: name one of them")
    if path.suffix == ".html":
        plotly_figures()
    else:
        _matplotlib()


def draw_sweep(
    path: Path, rows: Sequence[dict[str, Any]], varied: Sequence[str], constant: Sequence[str], title: str
) -> None:
    """Draw rows that differ in the settings `varied`; the same axis from 0 for all lines.

    constant  the other settings
    title     model and machine
    raises    ConfigError as `check_plot`
    """
    check_plot(path)
    axis = next((name for name in _NUMBERS if name in varied), "balancer")
    found = Sweep(lines_of(rows, axis, [name for name in varied if name != axis]), axis, title)
    if path.suffix == ".html":
        write_text(path, _page(found, rows, varied, constant))
    else:
        picture = _png(found)
        with atomic_path(path) as temporary:
            temporary.write_bytes(picture)


def lines_of(rows: Sequence[dict[str, Any]], axis: str, others: Sequence[str]) -> Lines:
    """Return places on the axis and values of each line, by its name; places in rising order.

    >>> lines_of([{"ranks": 8, VALUE: 2.0, "balancer": "eplb"}], "ranks", ["balancer"])
    {'eplb': ([8], [2.0])}
    """
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        words = [str(row[name]) if name == "balancer" else f"{row[name]} {_words(name)}" for name in others]
        lines.setdefault(", ".join(words), []).append((str(row[axis]) if axis == "balancer" else row[axis], row[VALUE]))
    return {
        name: ([place for place, _ in found], [value for _, value in found])
        for name, found in ((name, sorted(found, key=lambda pair: pair[0])) for name, found in lines.items())
    }


def constants_in_words(rows: Sequence[dict[str, Any]], constant: Sequence[str]) -> str:
    """Say which settings all points share; what follows from a varied one is told as a range.

    >>> constants_in_words([{"ranks": 8, "slots": 1, "balancer": "eplb"}], ["slots", "balancer"])
    'slots 1, balancer eplb'
    """
    found = []
    for name in constant:
        values = sorted({row[name] for row in rows if row[name] is not None})
        told = " to ".join(map(_shown, values[:: max(1, len(values) - 1)])) or "by the size of the trace"
        found.append(f"{_words(name)} {told}")
    return ", ".join(found)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _matplotlib() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError(
            "a .png is drawn with matplotlib, which is not installed: pip install 'relibra[report]', or name an .html"
        ) from error
    return matplotlib.figure


def _png(found: Sweep) -> bytes:
    import io

    figure = _matplotlib().Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bars = found.axis == "balancer"
    for number, (name, (places, values)) in enumerate(found.lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        if bars:
            axes.barh(places, values, color=colour, label=name)
        else:
            axes.plot(places, values, marker="o", color=colour, label=name)
    axes.set_title(found.title)
    (axes.set_xlabel if bars else axes.set_ylabel)(VALUE_NAME)
    if not bars:
        axes.set_xlabel(found.axis_name)
        axes.set_xscale("log" if found.log else "linear")
        axes.set_xticks(found.places, [f"{place:,}" for place in found.places])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
    if any(found.lines):
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _page(found: Sweep, rows: Sequence[dict[str, Any]], varied: Sequence[str], constant: Sequence[str]) -> str:
    best = max(rows, key=lambda row: row[VALUE])
    names = list(varied) or ["ranks", "balancer"]
    place = ", ".join(f"{_words(name)} {_shown(best[name])}" for name in names)
    constants = constants_in_words(rows, [name for name in constant if name not in names])
    about = f"{found.title}. " + f"The same for all {len(rows)} points: {constants}. " * bool(constants)
    figures = [[*(_shown(row[name]) for name in names), f"{row[VALUE]:,.0f}"] for row in rows]
    text_columns = [number for number, name in enumerate(names) if name == "balancer"]
    body = section(
        "sweep",
        VALUE_NAME[:1].upper() + VALUE_NAME[1:],
        paragraph(f"Label: simulated; nothing was measured. {about}{LEFT_OUT}", "how"),
        plot("sweep-plot", _figure(found), f"{VALUE_NAME} over {found.axis_name}; the table below has the figures"),
        table("Points of the sweep", [*map(_words, names), VALUE_NAME], figures, text_columns=text_columns),
    )
    sentence = f"Most {VALUE_NAME}, simulated: {best[VALUE]:,.0f} with {place}."
    footer = paragraph(f"relibra {relibra.__version__}; docs/simulation.md says what is simulated")
    return html_page(found.title, "sweep", sentence, body, footer, scripts=("page.js",), plotly=True)


def _figure(found: Sweep) -> Any:
    figure = plotly_figures().Figure()
    bars = found.axis == "balancer"
    for number, (name, (places, values)) in enumerate(found.lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        if bars:
            hover = "%{y}: %{x:,.0f}<extra></extra>"
            figure.add_bar(x=values, y=places, orientation="h", name=name, marker_color=colour, hovertemplate=hover)
        else:
            hover = f"{name}{', ' * bool(name)}%{{x}} {_words(found.axis)}: %{{y:,.0f}}<extra></extra>"
            figure.add_scatter(
                x=places, y=values, mode="lines+markers", name=name, line_color=colour, hovertemplate=hover
            )
    figure.update_layout(
        height=100 + 44 * len(found.places) if bars else 440,
        showlegend=any(found.lines),
        xaxis={
            "title": {"text": VALUE_NAME if bars else found.axis_name},
            "rangemode": "tozero" if bars else "normal",
        },
        yaxis={"automargin": True} if bars else {"title": {"text": VALUE_NAME}, "rangemode": "tozero"},
    )
    if not bars:
        ticks = {"tickmode": "array", "tickvals": found.places, "ticktext": [f"{place:,}" for place in found.places]}
        figure.update_xaxes(type="log" if found.log else "linear", **ticks)
    return figure
