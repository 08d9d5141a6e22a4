"""One picture of a sweep: throughput over what was varied, a line for each of the rest; PNG or a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from relibra.errors import ConfigError
from relibra.files import atomic_path, write_text
from relibra.reporting.pictures import PALETTE, plotly_figures

KINDS = (".png", ".html")
_NUMBERS = ("ranks", "micro_batch_tokens", "slots", "ranks_per_node", "pipeline_stages")
"""What may be the axis, in this order."""

VALUE, VALUE_NAME = "tokens_per_second_per_rank", "tokens per second and rank"


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


def draw_sweep(path: Path, rows: Sequence[dict[str, Any]], varied: Sequence[str], title: str) -> None:
    """Draw rows that differ in the settings `varied`; the same axis from 0 for all lines.

    raises    ConfigError as `check_plot`
    """
    check_plot(path)
    axis = next((name for name in _NUMBERS if name in varied), "balancer")
    lines = lines_of(rows, axis, [name for name in varied if name != axis])
    if path.suffix == ".html":
        write_text(path, _page(lines, axis, title))
    else:
        picture = _png(lines, axis, title)
        with atomic_path(path) as temporary:
            temporary.write_bytes(picture)


def lines_of(
    rows: Sequence[dict[str, Any]], axis: str, others: Sequence[str]
) -> dict[str, tuple[list[Any], list[float]]]:
    """Return places on the axis and values of each line, by its name; places in rising order.

    >>> lines_of([{"ranks": 8, "tokens_per_second_per_rank": 2.0, "balancer": "eplb"}], "ranks", ["balancer"])
    {'eplb': ([8], [2.0])}
    """
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        words = [str(row[name]) if name == "balancer" else f"{row[name]} {name.replace('_', ' ')}" for name in others]
        lines.setdefault(", ".join(words), []).append((str(row[axis]) if axis == "balancer" else row[axis], row[VALUE]))
    return {
        name: ([place for place, _ in found], [value for _, value in found])
        for name, found in ((name, sorted(found, key=lambda pair: pair[0])) for name, found in lines.items())
    }


def _matplotlib() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError(
            "a .png is drawn with matplotlib, which is not installed: pip install 'relibra[report]', or name an .html"
        ) from error
    return matplotlib.figure


def _png(lines: dict[str, tuple[list[Any], list[float]]], axis: str, title: str) -> bytes:
    import io

    figure = _matplotlib().Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bars = axis == "balancer"
    for number, (name, (places, values)) in enumerate(lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        if bars:
            axes.barh(places, values, color=colour, label=name)
        else:
            axes.plot(places, values, marker="o", color=colour, label=name)
    axes.set_title(title)
    (axes.set_xlabel if bars else axes.set_ylabel)(VALUE_NAME)
    if not bars:
        axes.set_xlabel(axis.replace("_", " "))
        axes.set_ylim(bottom=0)
    if any(lines):
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def _page(lines: dict[str, tuple[list[Any], list[float]]], axis: str, title: str) -> str:
    graphs = plotly_figures()
    figure = graphs.Figure()
    for number, (name, (places, values)) in enumerate(lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        if axis == "balancer":
            figure.add_bar(x=values, y=places, orientation="h", name=name, marker_color=colour)
        else:
            figure.add_scatter(x=places, y=values, mode="lines+markers", name=name, line_color=colour)
    names = (VALUE_NAME, None) if axis == "balancer" else (axis.replace("_", " "), VALUE_NAME)
    figure.update_layout(title=title, template="simple_white", showlegend=any(lines), height=480)
    figure.update_xaxes(title=names[0])
    figure.update_yaxes(title=names[1], rangemode="tozero")
    return str(figure.to_html(include_plotlyjs=True, full_html=True, div_id="sweep"))
