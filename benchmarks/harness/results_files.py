"""Result files: rows that say where they come from, and two of them held against each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import LABELS
from relibra.errors import ConfigError

ORIGIN = ("commit", "machine", "versions", "seed", "command", "label")
"""Without these nobody can say what a figure means, or get it again."""

IDENTITY = (
    "case",
    "label",
    "configuration",
    "seed",
    "balancer",
    "what",
    "sums",
    "algorithm",
    "targets",
    "setting",
    "ranks",
    "ep",
    "layers",
    "experts",
    "micro_batches",
    "case_skew",
)
"""Keys that say which row it is; all other numbers of a row are figures."""

NO_FIGURES = {*ORIGIN, *IDENTITY, "repetitions", "dirty", "target", "at_most", "sizes"}
SPREAD = (" low", " high", "min", "max")
"""How keys end that say how far a figure strays: these stray further than the figure and are not compared."""

Row = dict[str, Any]
LARGEST = 1e300
"""What is larger, or not a number, is no figure."""
TINY = 1e-9
"""What is smaller on both sides is rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of a row that differs; None on the side that lacks it.

    Where a whole row is on one side only, `figure` is empty and that side is 1.
    """

    row: str
    figure: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """After / before - 1."""
        return None if self.before is None or self.after is None or not self.before else self.after / self.before - 1

    def __str__(self) -> str:
        """One line for a person."""
        if not self.figure:
            return f"{self.row}: only in the {'second' if self.before is None else 'first'} file"
        figures = " -> ".join("missing" if one is None else f"{one:.6g}" for one in (self.before, self.after))
        change = "" if self.change is None else f" ({self.change:+.1%})"
        return f"{self.row}: {self.figure} {figures}{change}"


def read_results(path: Path) -> list[Row]:
    """Read the rows of a result file.

    raises    ConfigError when the file is not there, is no list of rows, or a row does not say where it comes from
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not there: name a result file, such as benchmarks/results/planner.json"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a result file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and "case" in row for row in rows):
        raise ConfigError(f"{path} holds no list of result rows, each with a case")
    for number, row in enumerate(rows):
        missing = [key for key in ORIGIN if key not in row]
        if missing:
            raise ConfigError(
                f"{path}, row {number} ({row['case']}) lacks {', '.join(missing)}: a row that does not say where it "
                "comes from proves nothing; write it with provenance.write_results"
            )
        if row["label"] not in LABELS:
            raise ConfigError(f"{path}, row {number} has label {row['label']!r}: allowed are {', '.join(LABELS)}")
    return rows


def compare(before: Sequence[Row], after: Sequence[Row], tolerance: float) -> list[Difference]:
    """Match rows by what identifies them and return every figure that differs by more than a share of the larger one.

    Rows alike in all of it are matched in their order. A row or a figure that only one side has differs.
    """
    assert tolerance >= 0, "a tolerance is a share, 0 or more"
    one, other = _by_identity(before), _by_identity(after)
    found: list[Difference] = []
    for key in dict.fromkeys((*one, *other)):
        name = _name(one.get(key) or other[key], key[-1])
        if key not in one or key not in other:
            sides = {"before": 1.0 if key in one else None, "after": 1.0 if key in other else None}
            found.append(Difference(row=name, figure="", **sides))
            continue
        figures, new_figures = dict(figures_of(one[key])), dict(figures_of(other[key]))
        for figure in dict.fromkeys((*figures, *new_figures)):
            old, new = figures.get(figure), new_figures.get(figure)
            if old is None or new is None or _differ(old, new, tolerance):
                found.append(Difference(row=name, figure=figure, before=old, after=new))
    return found


def refuse_strangers(before: Sequence[Row], after: Sequence[Row], names: tuple[str, str]) -> None:
    """Raise a ConfigError when no row of one file is in the other, so that nothing can be held against anything."""
    one, other = _by_identity(before), _by_identity(after)
    if one.keys().isdisjoint(other):
        first, second = (_name(rows[0], 1) for rows in (before, after))
        raise ConfigError(
            f"{names[0]} and {names[1]} share no case with the same settings: the first has {len(before)} rows such "
            f"as {first!r}, the second {len(after)} such as {second!r}; compare two files of the same program"
        )


def figures_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the figures of a row, those of tables inside it under KEY.KEY; lists are single repetitions, no figures."""
    for key, value in row.items():
        if key in NO_FIGURES or key.endswith(SPREAD):
            continue
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", figure) for inner, figure in figures_of(value))
        elif isinstance(value, bool | int | float) and abs(value) < LARGEST:
            yield key, float(value)


def _differ(old: float, new: float, tolerance: float) -> bool:
    """Tell whether two figures differ; what is not a number equals nothing but itself."""
    if old != old or new != new:
        return (old != old) != (new != new)
    largest = max(abs(old), abs(new))
    return largest > TINY and not abs(old - new) <= tolerance * largest


def _by_identity(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    found: dict[tuple[Any, ...], Row] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = tuple(json.dumps(_rounded(row.get(name))) for name in IDENTITY)
        seen[key] = seen.get(key, 0) + 1
        found[*key, seen[key]] = row
    return found


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _name(row: Row, nth: int) -> str:
    parts = [str(row["case"])]
    parts += [
        f"{key} {_rounded(row[key])}"
        for key in IDENTITY
        if key not in ("case", "label", "configuration") and row.get(key) not in (None, "") and key != "seed"
    ]
    return ", ".join(parts) + (f" (number {nth})" if nth > 1 else "")
