"""Rows that each expert gets from each attention node: even, drawn from a popularity, or those of a recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64, Shaped
from numpy import ndarray
from numpy.random import Generator

from relibra.errors import TraceError
from relibra.routing.trace import RoutingTrace

POOL_TOKENS = 2048
"""Tokens whose routes are drawn once; the tokens of a micro-batch are consecutive ones of them."""


@dataclass(frozen=True, kw_only=True)
class EvenRoutes:
    """Equally many rows for all experts, fractions of a row included: what a search assumes."""

    layers: int
    experts: int
    top_k: int

    def draw(self, rows_MX: Int[ndarray, "M X"], rng: Generator) -> Float64[ndarray, "L M X E"]:  # noqa: ARG002
        """Return rows x top_k / experts everywhere; X counts attention nodes."""
        even_MX = rows_MX * (self.top_k / self.experts)
        shape = (self.layers, *rows_MX.shape, self.experts)
        return np.broadcast_to(even_MX[None, :, :, None], shape).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class RoutePool:
    """Routes of T tokens; a micro-batch of a node takes consecutive ones from a random token on, wrapping at the end.

    before_TLE    rows of each expert in the first 0, 1, ..., T tokens: T + 1 entries
    """

    before_TLE: Int64[ndarray, "T L E"]

    def draw(self, rows_MX: Int[ndarray, "M X"], rng: Generator) -> Float64[ndarray, "L M X E"]:
        """Return the rows for each expert."""
        tokens = len(self.before_TLE) - 1
        start_MX = rng.integers(tokens, size=rows_MX.shape)
        whole_MX, rest_MX = np.divmod(start_MX + rows_MX, tokens)
        counts_MXLE = (
            whole_MX[..., None, None] * self.before_TLE[-1] + self.before_TLE[rest_MX] - self.before_TLE[start_MX]
        )
        return np.moveaxis(counts_MXLE, 2, 0).astype(np.float64)


Routes = EvenRoutes | RoutePool
"""Where the tokens of a step go."""


def drawn_routes(
    popularity_E: Float64[ndarray, " E"], layers: int, top_k: int, rng: Generator, *, tokens: int = POOL_TOKENS
) -> RoutePool:
    """Return routes of tokens that pick `top_k` different experts by popularity, shuffled in each layer.

    popularity_E    weight of each expert; equal ones: uniform routes
    """
    log_E = np.log(popularity_E)
    counts_TLE = np.zeros((tokens, layers, len(popularity_E)), dtype=np.int64)
    for layer in range(layers):
        score_TE = rng.permutation(log_E) + rng.gumbel(size=(tokens, len(log_E)))
        chosen_TK = np.argpartition(-score_TE, top_k - 1, axis=1)[:, :top_k]
        np.put_along_axis(counts_TLE[:, layer], chosen_TK, 1, axis=1)
    return _pool(counts_TLE)


def recorded_routes(trace: RoutingTrace, layers: int) -> RoutePool:
    """Return the routes of a recording; where it has fewer layers than the model, they are used again in turn.

    raises    TraceError for a recording without routes
    """
    experts_TLK: Shaped[ndarray, "T L K"] = trace.experts_TLK[trace.valid_T]
    if not len(experts_TLK):
        raise TraceError("the trace has no row with routes: name one that has")
    chosen_TLK = experts_TLK[:, np.arange(layers) % trace.num_layers].astype(np.int64)
    counts_TLE = np.zeros((*chosen_TLK.shape[:2], trace.num_experts), dtype=np.int64)
    np.put_along_axis(counts_TLE, chosen_TLK, 1, axis=2)
    return _pool(counts_TLE)


def _pool(counts_TLE: Int64[ndarray, "T L E"]) -> RoutePool:
    before_TLE = np.zeros((len(counts_TLE) + 1, *counts_TLE.shape[1:]), dtype=np.int64)
    np.cumsum(counts_TLE, axis=0, out=before_TLE[1:])
    return RoutePool(before_TLE=before_TLE)
