"""`SweepLines`: throughput over a varied setting, one line for each combination of the other varied settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

AXES = ("ranks", "micro_batch_tokens", "slots", "ranks_per_node", "pipeline_stages")
"""Settings that can be the axis: the first of them that varies; without one, balancers are bars."""

LOG_RANGE = 8
"""Numbers whose largest is so many times the smallest are on a logarithmic axis, so that ticks keep apart."""

VALUE = "tokens_per_second_per_rank"
STATIC_VALUE = "static_tokens_per_second_per_rank"
"""Of the static layout on the machine and micro-batches of a row."""

OF_PLANS = ("slots", "balancer")
"""Settings that the static layout does not depend on."""


class SweepLines(NamedTuple):
    """What is drawn.

    lines    positions on the axis, rising, and values of each line, by its name
    axis     the setting along the axis
    """

    lines: dict[str, tuple[list[Any], list[float]]]
    axis: str

    @staticmethod
    def is_static(name: str) -> bool:
        """Whether a line is one of the static layout.

        >>> SweepLines.is_static("16 slots, static"), SweepLines.is_static("eplb")
        (True, False)
        """
        return "static" in name.split(", ")

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
    """Return the lines of rows that differ in the settings `varied`, and those of the static layout beside them.

    >>> sweep_lines([{"ranks": 8, VALUE: 2.0, "balancer": "eplb"}], ["ranks", "balancer"]).lines
    {'eplb': ([8], [2.0])}
    """
    axis = next((name for name in AXES if name in varied), "balancer")
    others = [name for name in varied if name != axis]
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        words = [str(row[name]) if name == "balancer" else f"{row[name]} {setting_name(name)}" for name in others]
        lines.setdefault(", ".join(words), []).append((row[axis], row[VALUE]))
    if all(row["balancer"] != "static" and STATIC_VALUE in row for row in rows):
        _add_static(lines, rows, axis, others)
    ordered = {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}
    return SweepLines(
        {name: ([tick for tick, _ in points], [value for _, value in points]) for name, points in ordered.items()}, axis
    )


def _add_static(
    lines: dict[str, list[tuple[Any, float]]], rows: Sequence[dict[str, Any]], axis: str, others: Sequence[str]
) -> None:
    """Add lines of the static layout, or its bar beside those of balancers; an only line gets its balancer's name."""
    if axis == "balancer":
        lines[""].append(("static", rows[0][STATIC_VALUE]))
        return
    if "" in lines:
        lines[rows[0]["balancer"]] = lines.pop("")
    points: dict[str, dict[Any, float]] = {}
    for row in rows:
        words = [f"{row[name]} {setting_name(name)}" for name in others if name not in OF_PLANS]
        points.setdefault(", ".join([*words, "static"]), {})[row[axis]] = row[STATIC_VALUE]
    lines |= {name: list(found.items()) for name, found in points.items()}


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


def fell_back(row: Mapping[str, Any]) -> bool:
    """Return whether the balancer of a row kept the static layout; a row without a plan did not."""
    return bool(row.get("kept_static")) and row["balancer"] != "static"


def balancer_text(row: Mapping[str, Any]) -> str:
    """Return the balancer of a row, and whether it kept the static layout.

    >>> balancer_text({"balancer": "eplb", "kept_static": True})
    'static (instead of eplb)'
    """
    return f"static (instead of {row['balancer']})" if fell_back(row) else str(row["balancer"])


def setting_name(name: str) -> str:
    """Return the name of a setting in words."""
    return name.replace("_", " ")


def setting_text(value: object) -> str:
    """Return the value of a setting as text."""
    return f"{value:,}" if isinstance(value, int) else str(value)
