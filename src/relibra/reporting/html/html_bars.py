"""Tables whose rows have a bar made of HTML: readable at any width and without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row.

    low, high   ends of the bar, in the unit of the axis
    kind        class of the style sheet: "whole", "saved", "added" or "limit"; each has a texture of its own
    mark        place of a line across the bar; None: no line
    """

    name: str
    low: float
    high: float
    kind: str
    cells: tuple[str, ...]
    mark: float | None = None


def bar_table(caption: str, header: Sequence[str], bars: Sequence[Bar], *, start: float, end: float) -> str:
    """Return a table with a bar per row on one axis.

    header       of the name, then of each cell; the column of bars has no title but the ends of its axis
    start, end   of the axis
    """
    span = (end - start) or 1.0
    head = "".join(
        f'<th scope="col" class="{"name" if i == 0 else "number"}">{escape(text)}</th>' for i, text in enumerate(header)
    )
    rows = []
    for bar in bars:
        left, width = 100 * (bar.low - start) / span, 100 * (bar.high - bar.low) / span
        cells = "".join(f'<td class="number">{escape(cell)}</td>' for cell in bar.cells)
        place = f"left:{left:.2f}%;width:{max(width, 0):.2f}%"
        rows.append(
            f'<tr><th scope="row" class="name">{escape(bar.name)}</th>{cells}'
            f'<td class="track"><span class="bar {bar.kind}" style="{place}"></span>{_mark(bar, start, span)}</td></tr>'
        )
    return (
        f'<table class="bars"><caption>{escape(caption)}</caption><thead><tr>{head}'
        f'<td class="track" aria-hidden="true"></td></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _mark(bar: Bar, start: float, span: float) -> str:
    return "" if bar.mark is None else f'<span class="mark" style="left:{100 * (bar.mark - start) / span:.2f}%"></span>'


def waterfall(levers: Sequence[tuple[str, float]], reachable: Sequence[tuple[str, float]]) -> str:
    """Return the skew after each lever: the start, the change by each, the plan, and its bound.

    levers, reachable   as `reporting.data.levers.lever_gaps` and `lever_bounds` return them
    """
    start, steps, bound = levers[0], levers[1:-1], levers[-1]
    reached = {name: f"{value:.3f}" for name, value in reachable}

    def whole(name: str, value: float, kind: str = "whole") -> Bar:
        return Bar(name=name, low=1.0, high=value, kind=kind, cells=(f"{value:.3f}", "", reached.get(name, "")))

    bars = [whole(*start)]
    for (_, previous), (name, value) in zip(levers[:-2], steps, strict=True):
        kind = "saved" if value <= previous else "added"
        cells = (f"{value:.3f}", f"{round(value - previous, 3) + 0.0:+.3f}", reached.get(name, ""))
        bars.append(Bar(name=name, low=min(previous, value), high=max(previous, value), kind=kind, cells=cells))
    bars += [whole("the plan", steps[-1][1]), whole("its bound", bound[1], "limit")]
    end = max(max(bar.high for bar in bars), 1.01)
    return bar_table(
        "Skew after each lever; bars begin at 1, which is even",
        ("lever", "skew", "change", "reachable"),
        bars,
        start=1.0,
        end=end,
    )
