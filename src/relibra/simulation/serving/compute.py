"""Seconds that nodes compute for given rows: by the roofline of a plan, by lines, or by a measured table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Shaped
from numpy import ndarray

from relibra.errors import ConfigError
from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.performance import Efficiency, attention_seconds, expert_seconds, rest_seconds
from relibra.planning.deployment.served_model import ServedModel


@runtime_checkable
class Compute(Protocol):
    """Seconds of nodes; arrays of any shape, each entry for itself."""

    def attention(
        self, rows: Shaped[ndarray, "*X"], tokens: Shaped[ndarray, "*X"]
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of one layer, and of a step outside of layers with experts.

        rows      requests
        tokens    that they attend to, together
        """

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of nodes with P experts, of the rows of each expert."""


@dataclass(frozen=True, kw_only=True)
class RooflineCompute:
    """Seconds by the formulas of `planning.deployment.performance`.

    attention_node, expert_node    accelerator and GPUs of a node
    """

    model: ServedModel
    attention_node: tuple[Accelerator, int]
    expert_node: tuple[Accelerator, int]
    efficiency: Efficiency

    def attention(
        self, rows: Shaped[ndarray, "*X"], tokens: Shaped[ndarray, "*X"]
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of one layer, and of a step outside of layers with experts; no rows take no time."""
        context = tokens / np.maximum(1, rows)
        gpu, ways = self.attention_node
        layer = attention_seconds(self.model, gpu, ways, rows, context, self.efficiency)
        rest = rest_seconds(self.model, gpu, ways, rows, context, self.efficiency)
        return np.where(rows > 0, layer, 0.0), np.where(rows > 0, rest, 0.0)

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of nodes; an expert without rows is not read."""
        gpu, ways = self.expert_node
        launch = self.efficiency.launch_seconds
        each = np.asarray(expert_seconds(self.model, gpu, ways, rows, 1, self.efficiency)) - launch
        busy = (rows > 0).any(axis=-1)
        total: Float64[ndarray, "*X"] = np.where(rows > 0, each, 0.0).sum(axis=-1) + np.where(busy, launch, 0.0)
        return total


@dataclass(frozen=True, kw_only=True)
class LinearCompute:
    """Seconds on lines: attention a + b rows + c tokens, experts a + b rows; constant with b = c = 0 (`k1` to `k4`)."""

    attention_line: tuple[int | float, int | float, int | float]
    expert_line: tuple[int | float, int | float]

    def attention(
        self, rows: Shaped[ndarray, "*X"], tokens: Shaped[ndarray, "*X"]
    ) -> tuple[Float64[ndarray, "*X"], Float64[ndarray, "*X"]]:
        """Return seconds of one layer; nothing is outside of layers."""
        fixed, per_row, per_token = self.attention_line
        seconds = fixed + per_row * rows + per_token * tokens
        return np.asarray(seconds, dtype=np.float64), np.zeros(np.shape(rows))

    def experts(self, rows: Float64[ndarray, "*X P"]) -> Float64[ndarray, "*X"]:
        """Return the seconds of nodes; the fixed part once per node."""
        fixed, per_row = self.expert_line
        total: Float64[ndarray, "*X"] = fixed + per_row * rows.sum(axis=-1)
        return total


@dataclass(frozen=True, kw_only=True)
class MeasuredCompute:
    """Seconds between measured ones, at rising rows; beyond the last on the line of the last two.

    attention_table    (requests, seconds) of one layer
    expert_table       (rows, seconds) of one expert
    raises             ConfigError for fewer than two entries, or rows that do not rise
    """

    attention_table: tuple[tuple[int | float, int | float], ...]
    expert_table: tuple[tuple[int | float, int | float], ...]

    def __post_init__(self) -> None:
        """Raise ConfigError for tables that are none."""
        for name, table in (("attention", self.attention_table), ("expert", self.expert_table)):
            rows = [row for row, _ in table]
            if len(rows) < 2 or rows != sorted(set(rows)):
                raise ConfigError(f"measured {name} seconds have rows {rows}: give at least two, rising")

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


def _between(
    table: tuple[tuple[int | float, int | float], ...], rows: Float64[ndarray, "*X"]
) -> Float64[ndarray, "*X"]:
    at, seconds = (np.array(column, dtype=np.float64) for column in zip(*table, strict=True))
    slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
    return np.interp(rows, at, seconds) + np.maximum(0.0, rows - at[-1]) * slope
