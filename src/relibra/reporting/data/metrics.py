"""`Metrics`: the rows that a training run wrote, one per RL step.

A row is a JSON object on a line of its own. The writer may be killed in the middle of a line, and a resumed run may
repeat steps: an unfinished last line is ignored, other unreadable lines are counted, the last row of a step is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Rows in order of their step.

    rows         one mapping per step, any key may be missing
    unreadable   lines that hold no row, an unfinished last one not counted
    """

    rows: tuple[Mapping[str, Any], ...] = ()
    unreadable: int = 0

    @property
    def steps(self) -> list[int]:
        """The step of each row."""
        return [row["step"] for row in self.rows]

    def column(self, name: str, part: str = "") -> list[float | None]:
        """Return one number per row; None where it is missing or not finite.

        part   key inside of the table `name`; "": `name` is the number itself
        """
        values = [row.get(name) for row in self.rows]
        if part:
            values = [value.get(part) if isinstance(value, dict) else None for value in values]
        return [finite_number(value) for value in values]

    def known(self, name: str, part: str = "") -> list[float]:
        """Return the numbers of `column` that are there."""
        return [value for value in self.column(name, part) if value is not None]

    def last(self, name: str, part: str = "") -> float | None:
        """Return the latest number."""
        return next(reversed(self.known(name, part)), None)

    def texts(self, name: str) -> list[list[str]]:
        """Return, per row, the texts of the list under `name`."""
        lists = [row.get(name) for row in self.rows]
        return [[text for text in texts if isinstance(text, str)] if isinstance(texts, list) else [] for texts in lists]

    def seconds(self) -> dict[str, list[float | None]]:
        """Return the seconds of each stage per row; stages in order of first appearance."""
        tables = [table for row in self.rows if isinstance(table := row.get("seconds"), dict)]
        stages = dict.fromkeys(stage for table in tables for stage in table)
        return {stage: self.column("seconds", stage) for stage in stages if self.known("seconds", stage)}


def finite_number(value: object) -> float | None:
    """Return a finite number as a float, anything else as None.

    >>> [finite_number(value) for value in (3, True, "3", float("nan"), 10**400)]
    [3.0, None, None, None, None]
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
    found = list(iterate_rows(path))
    rows = {row["step"]: row for row in found if row is not None}
    return Metrics(rows=tuple(rows[step] for step in sorted(rows)), unreadable=found.count(None))


def iterate_rows(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the JSON object of each line that has a step; None for others, except blank and unfinished last ones."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and whole_number(row.get("step")) is not None:
                yield row
            elif line.strip() and line.endswith(b"\n"):
                yield None


def whole_number(value: object) -> int | None:
    """Return a whole number that JavaScript holds exactly, from 0 on; anything else as None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None
