"""Seconds that nodes compute for given rows: by the roofline of a plan, or by a measured table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Float64, Shaped
from numpy import ndarray
from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import build, check_fields
from relibra.files import read_toml
from relibra.planning.deployment.performance import Node

_Number = Annotated[int | float, Field(ge=0, le=1e9)]
Table = tuple[tuple[_Number, _Number], ...]


@dataclass(frozen=True, kw_only=True)
class RooflineCompute:
    """Seconds by the formulas of `planning.deployment.performance`."""

    attention_node: Node
    expert_node: Node

    def attention(
        self, rows: Shaped[ndarray, "*X"], tokens: Shaped[ndarray, "*X"]
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of one layer, and of a step outside of layers with experts; no rows take no time.

        rows      requests
        tokens    that they attend to, together
        """
        context, node = tokens / np.maximum(1, rows), self.attention_node
        return np.where(rows > 0, node.attention(rows, context), 0.0), np.where(rows > 0, node.rest(rows, context), 0.0)

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of nodes with P experts, of the rows of each expert; one without rows is not read."""
        launch = self.expert_node.used.launch_seconds
        each = np.asarray(self.expert_node.experts(rows, 1)) - launch
        busy = (rows > 0).any(axis=-1)
        total: Float64[ndarray, "*X"] = np.where(rows > 0, each, 0.0).sum(axis=-1) + np.where(busy, launch, 0.0)
        return total


@dataclass(frozen=True, kw_only=True)
class MeasuredCompute:
    """Seconds between measured ones, at rising rows; beyond the last on the line of the last two.

    attention_table    (requests, seconds) of one layer
    expert_table       (rows, seconds) of one expert
    raises             ConfigError for fewer than two entries, rows that do not rise, or numbers out of range
    """

    attention_table: Table
    expert_table: Table

    def __post_init__(self) -> None:
        check_fields(MeasuredCompute, vars(self), "measured seconds", ConfigError)
        for name, table in vars(self).items():
            rows = [row for row, _ in table]
            if len(rows) < 2 or rows != sorted(set(rows)):
                raise ConfigError(f"measured seconds: {name} has rows {rows}: give at least two, rising")

    def attention(
        self,
        rows: Shaped[ndarray, "*X"],
        tokens: Shaped[ndarray, "*X"],  # noqa: ARG002
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of one layer; nothing is outside of layers."""
        return _between(self.attention_table, rows.astype(np.float64)), np.zeros(np.shape(rows))

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of nodes; an expert without rows takes no time."""
        total: Float64[ndarray, "*X"] = np.where(rows > 0, _between(self.expert_table, rows), 0.0).sum(axis=-1)
        return total


Compute = RooflineCompute | MeasuredCompute
"""Seconds of nodes; arrays of any shape, each entry for itself."""


def read_measured(path: Path) -> MeasuredCompute:
    """Return the seconds in a TOML file: tables `attention` and `expert`, of [rows, seconds] each.

    raises    ConfigError when the file cannot be read, or its tables are none
    """
    found = read_toml(path, ConfigError, "a TOML file of measured seconds")
    if found.keys() != {"attention", "expert"} or not all(isinstance(pairs, list) for pairs in found.values()):
        raise ConfigError(
            f"{path} must have two lists of [rows, seconds]: attention, a layer of a node, and expert, one expert"
        )
    tables = {f"{name}_table": pairs for name, pairs in found.items()}
    return build(MeasuredCompute, tables, str(path), ConfigError)


def _between(table: Table, rows: Float64[ndarray, "*X"]) -> Float64[ndarray, "*X"]:
    at, seconds = (np.array(column, dtype=np.float64) for column in zip(*table, strict=True))
    slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
    return np.interp(rows, at, seconds) + np.maximum(0.0, rows - at[-1]) * slope
