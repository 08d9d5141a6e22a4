"""`SweepLines`: throughput over a varied setting, one line for each combination of the other varied settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

AXES = ("ranks", "micro_batch_tokens", "slots", "ranks_per_node", "pipeline_stages")
"""Settings that can be the axis: the first of them that varies; without one, balancers are bars."""

LOG_RANGE = 8
"""Numbers whose largest is so many times the smallest are on a logarithmic axis, so that ticks keep apart."""

VALUE = "tokens_per_second_per_rank"


class SweepLines(NamedTuple):
    """What is drawn.

    lines    positions on the axis, rising, and values of each line, by its name
    axis     the setting along the axis
    """

    lines: dict[str, tuple[list[Any], list[float]]]
    axis: str

    @property
    def ticks(self) -> list[Any]:
        """All positions on the axis, rising."""
        return sorted({tick for ticks, _ in self.lines.values() for tick in ticks})

    @property
    def has_bars(self) -> bool:
        """Whether balancers are drawn as bars."""
        return self.axis == "balancer"

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic."""
        return not self.has_bars and 0 < LOG_RANGE * self.ticks[0] <= self.ticks[-1]

    @property
    def axis_name(self) -> str:
        """The title of the axis."""
        return setting_name(self.axis) + " (logarithmic)" * self.is_log


def sweep_lines(rows: Sequence[dict[str, Any]], varied: Sequence[str]) -> SweepLines:
    """Return the lines of rows that differ in the settings `varied`.

    >>> sweep_lines([{"ranks": 8, VALUE: 2.0, "balancer": "eplb"}], ["ranks", "balancer"]).lines
    {'eplb': ([8], [2.0])}
    """
    axis = next((name for name in AXES if name in varied), "balancer")
    others = [name for name in varied if name != axis]
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        words = [str(row[name]) if name == "balancer" else f"{row[name]} {setting_name(name)}" for name in others]
        lines.setdefault(", ".join(words), []).append((row[axis], row[VALUE]))
    ordered = {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}
    return SweepLines(
        {name: ([tick for tick, _ in points], [value for _, value in points]) for name, points in ordered.items()}, axis
    )


def describe_constants(rows: Sequence[dict[str, Any]], constant: Sequence[str]) -> str:
    """Return the settings that all points share; one that follows from a varied setting as a range.

    >>> describe_constants([{"ranks": 8, "slots": 1, "balancer": "eplb"}], ["slots", "balancer"])
    'slots 1, balancer eplb'
    """
    found = []
    for name in constant:
        values = sorted({row[name] for row in rows if row[name] is not None})
        ends = " to ".join(map(setting_text, values[:: max(1, len(values) - 1)])) or "of the given schedule"
        found.append(f"{setting_name(name)} {ends}")
    return ", ".join(found)


def setting_name(name: str) -> str:
    """Return the name of a setting in words."""
    return name.replace("_", " ")


def setting_text(value: object) -> str:
    """Return the value of a setting as text."""
    return f"{value:,}" if isinstance(value, int) else str(value)
