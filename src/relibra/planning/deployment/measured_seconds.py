"""`MeasuredSeconds`: tables of seconds that were measured on a node, and the TOML file that they are read from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import build, check_fields
from relibra.files import read_toml
from relibra.planning.deployment.pipeline_time import Amount

_Number = Annotated[int | float, Field(ge=0, le=1e15)]
Table = tuple[tuple[_Number, _Number], ...]


def fit_line(table: Table) -> tuple[float, float, float]:
    """Return start and slope of the least squares line of two entries or more, and its R2."""
    x_X, seconds_X = np.array(table, dtype=np.float64).T
    slope, start = np.polyfit(x_X, seconds_X, 1)
    left, spread = np.sum((seconds_X - start - slope * x_X) ** 2), np.sum((seconds_X - seconds_X.mean()) ** 2)
    return float(start), float(slope), float(1 - left / spread) if spread else 1.0


@dataclass(frozen=True, kw_only=True)
class MeasuredSeconds:
    """Tables at rising rows or bytes.

    attention    (requests, seconds) of one layer; what a decode step has outside of layers is spread over them
    expert       (rows, seconds) of one expert
    message      (bytes, seconds) one way; bytes as plans count them: two per value, a row per choice; may be empty
    raises       ConfigError for tables of less than two entries, or that do not rise, and numbers out of range
    """

    attention: Table
    expert: Table
    message: Table = ()

    def __post_init__(self) -> None:
        check_fields(MeasuredSeconds, vars(self), "measured seconds", ConfigError)
        for name, table in vars(self).items():
            amounts, needed = [amount for amount, _ in table], name != "message"
            if (table or needed) and (len(amounts) < 2 or amounts != sorted(set(amounts))):
                raise ConfigError(f"measured seconds: {name} has rows or bytes {amounts}: give at least two, rising")
            if needed and fit_line(table)[1] <= 0:
                raise ConfigError(f"measured seconds of {name} do not rise with rows: measure again on a quiet machine")


def seconds_at(table: Table, amount: Amount) -> Amount:
    """Return interpolated seconds; below the first entry its own, beyond the last along the slope of the table."""
    at_X, seconds_X = np.array(table, dtype=np.float64).T
    found: Amount = np.interp(amount, at_X, seconds_X) + np.maximum(0.0, amount - at_X[-1]) * fit_line(table)[1]
    return found


def read_measured(path: Path) -> MeasuredSeconds:
    """Return the seconds in a TOML file, whose lists are the fields of `MeasuredSeconds`; raises ConfigError."""
    found = read_toml(path, ConfigError, "a TOML file of measured seconds")
    return build(MeasuredSeconds, found, str(path), ConfigError)
