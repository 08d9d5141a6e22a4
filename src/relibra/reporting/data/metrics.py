"""`Metrics`: the rows that a training run wrote, one per RL step, as a reader can trust them.

A row is a JSON object on a line of its own. The writer may be killed in the middle of a line, and a resumed run may
repeat steps: a cut last line is ignored, other unreadable lines are counted, and the last row of a step wins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Rows in order of their step.

    rows         one mapping per step, any key may be missing
    unreadable   lines that hold no row, the cut last one not counted
    """

    rows: tuple[Mapping[str, Any], ...] = ()
    unreadable: int = 0

    @property
    def steps(self) -> list[int]:
        """The step of each row."""
        return [row["step"] for row in self.rows]

    def column(self, name: str) -> list[float | None]:
        """Return one number per row; None where it is missing or not finite."""
        return [number(row.get(name)) for row in self.rows]

    def has(self, name: str) -> bool:
        """Say whether any row holds a number under this name."""
        return any(value is not None for value in self.column(name))

    def last(self, name: str) -> float | None:
        """Return the latest number under this name."""
        return next((value for value in reversed(self.column(name)) if value is not None), None)

    def nested(self, name: str, part: str) -> list[float | None]:
        """Return one number per row from the table under `name`; None where there is none."""
        tables = [row.get(name) for row in self.rows]
        return [number(table.get(part)) if isinstance(table, dict) else None for table in tables]

    def texts(self, name: str) -> list[list[str]]:
        """Return the texts in the list under `name`, per row."""
        lists = [row.get(name) for row in self.rows]
        return [[text for text in texts if isinstance(text, str)] if isinstance(texts, list) else [] for texts in lists]

    def seconds(self) -> dict[str, list[float | None]]:
        """Return the seconds of each stage per row; stages in order of first appearance."""
        tables = [table if isinstance(table := row.get("seconds"), dict) else {} for row in self.rows]
        stages = dict.fromkeys(stage for table in tables for stage in table)
        columns = {stage: [number(table.get(stage)) for table in tables] for stage in stages}
        return {stage: column for stage, column in columns.items() if any(value is not None for value in column)}


def number(value: object) -> float | None:
    """Return a finite number as a float, anything else as None.

    >>> number(3), number(True), number("3"), number(float("nan")), number(10**400)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def read_metrics(path: Path) -> Metrics:
    """Read a metrics file; one that does not exist has no rows."""
    if not path.is_file():
        return Metrics()
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    cut = lines.pop()  # empty when the last line is whole
    rows: dict[int, Mapping[str, Any]] = {}
    unreadable = 0
    for line in [*lines, *([cut] if _row(cut) else [])]:
        row = _row(line)
        if row is not None:
            rows[row["step"]] = row
        elif line.strip():
            unreadable += 1
    return Metrics(rows=tuple(rows[step] for step in sorted(rows)), unreadable=unreadable)


def _row(line: str) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    is_row = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53
    return row if is_row else None
