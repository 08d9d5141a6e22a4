"""`SweepLines`: throughput over a varied setting, one line for each combination of the other varied settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

AXES = ("ranks", "micro_batch_tokens", "slots", "ranks_per_node", "pipeline_stages")
"""The axis is the first of these that varies; if none does, balancers are its categories."""
LOG_RANGE = 8
"""From this ratio of the largest number to the smallest on, an axis is logarithmic: ticks keep apart."""
VALUE = "tokens_per_second_per_rank"
STATIC_VALUE = "static_tokens_per_second_per_rank"
"""The same of the static layout, on a row's machine and micro-batches."""
OF_PLANS = ("slots", "balancer")
"""Settings that the static layout does not depend on."""
STATIC = "static"


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
    def is_log(self) -> bool:
        """Whether the axis is logarithmic."""
        return self.axis != "balancer" and 0 < LOG_RANGE * self.ticks[0] <= self.ticks[-1]

    @property
    def axis_name(self) -> str:
        """The title of the axis."""
        name = setting_name(self.axis)
        return f"{name} (logarithmic)" if self.is_log else name


def sweep_lines(rows: Sequence[dict[str, Any]], varied: Sequence[str]) -> SweepLines:
    """Return the lines of rows that differ in the settings `varied`, and those of the static layout beside them.

    >>> sweep_lines([{"ranks": 8, VALUE: 2.0, "balancer": "eplb"}], ["ranks", "balancer"]).lines
    {'eplb': {8: 2.0}}
    """
    axis = next((name for name in AXES if name in varied), "balancer")
    others = [name for name in varied if name not in (axis, "balancer")]
    lines: dict[str, dict[Any, float]] = {}
    static: dict[str, dict[Any, float]] = {}
    for row in rows:
        name = ", ".join([*_settings(row, others), str(row["balancer"])] if axis != "balancer" else [])
        lines.setdefault(name, {})[row[axis]] = row[VALUE]
        if STATIC_VALUE in row:
            name = ", ".join([*_settings(row, [name for name in others if name not in OF_PLANS]), STATIC])
            static.setdefault(name, {})[STATIC if axis == "balancer" else row[axis]] = row[STATIC_VALUE]
    if all(row["balancer"] != STATIC for row in rows):
        lines |= {"": lines[""] | static[STATIC]} if axis == "balancer" and static else static
    rising = axis != "balancer"
    return SweepLines({name: dict(sorted(line.items())) if rising else line for name, line in lines.items()}, axis)


def _settings(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{row[name]} {setting_name(name)}" for name in names]


def describe_constants(rows: Sequence[dict[str, Any]], constant: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and values of the settings that all points share; one that follows from a varied setting is a range.

    >>> describe_constants([{"ranks": 8, "slots": 1, "balancer": "eplb"}], ["slots", "balancer"])
    [('slots', '1'), ('balancer', 'eplb')]
    """
    found = []
    for name in constant:
        values = sorted({row[name] for row in rows if row[name] is not None})
        ends = " to ".join(map(setting_text, values[:: max(1, len(values) - 1)])) or "of the given schedule"
        found.append((setting_name(name), ends))
    return found


def balancer_text(row: Mapping[str, Any]) -> str:
    """Return the balancer of a row, and whether it kept the static layout.

    >>> balancer_text({"balancer": "eplb", "kept_static": True})
    'static (instead of eplb)'
    """
    fell_back = row.get("kept_static") and row["balancer"] != STATIC
    return f"static (instead of {row['balancer']})" if fell_back else str(row["balancer"])


def setting_name(name: str) -> str:
    """Return the name of a setting for a reader."""
    return name.replace("_", " ")


def setting_text(value: object) -> str:
    """Return the value of a setting as text."""
    return f"{value:,}" if isinstance(value, int) else str(value)
