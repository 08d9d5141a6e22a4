"""Bars made of HTML: tables whose rows carry a bar, so that figures stay readable at any width and without a script."""

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
    """Return the skew as levers are pulled: where it starts, what each takes off, what stays, and the bound.

    levers, reachable   as `planning.levers.lever_gaps` and `lever_bounds` return them
    """
    start, steps, bound = levers[0], levers[1:-1], levers[-1]
    could = dict(reachable)
    bars = [
        Bar(name=start[0], low=1.0, high=start[1], kind="whole", cells=(f"{start[1]:.3f}", "", _could(could, start[0])))
    ]
    for (_, previous), (name, value) in zip(levers[:-2], steps, strict=True):
        kind = "saved" if value <= previous else "added"
        cells = (f"{value:.3f}", f"{value - previous:+.3f}", _could(could, name))
        bars.append(Bar(name=name, low=min(previous, value), high=max(previous, value), kind=kind, cells=cells))
    bars.append(Bar(name="the plan", low=1.0, high=steps[-1][1], kind="whole", cells=(f"{steps[-1][1]:.3f}", "", "")))
    bars.append(Bar(name="its bound", low=1.0, high=bound[1], kind="limit", cells=(f"{bound[1]:.3f}", "", "")))
    end = max(max(bar.high for bar in bars), 1.01)
    return bar_table(
        "Skew after each lever; bars begin at 1, which is even",
        ("lever", "skew", "change", "reachable"),
        bars,
        start=1.0,
        end=end,
    )


def _could(reachable: dict[str, float], lever: str) -> str:
    return f"{reachable[lever]:.3f}" if lever in reachable else ""
