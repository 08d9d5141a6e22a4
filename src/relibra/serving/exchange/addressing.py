"""Which rows each expert worker gets: a token once, with its choices there."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from numpy import ndarray

from relibra.routing.compiled import compiled


class Addressed(NamedTuple):
    """Rows and choices of one exchange; a row is a token at a worker.

    rows_N      rows of each worker
    token_Y     token of each row, by worker, then ascending
    counts_NE   choices of each expert at each worker
    choice_C    choices, as places in `[T, K]`, by worker, then expert, then ascending
    row_C       row of each, counted from the first one of its worker
    """

    rows_N: ndarray
    token_Y: ndarray
    counts_NE: ndarray
    choice_C: ndarray
    row_C: ndarray


def address_choices(expert_TK: ndarray, worker_TK: ndarray, workers: int, num_experts: int) -> Addressed:
    """Return the rows of each worker from the experts of tokens and the worker of each choice."""
    return Addressed(*_address(expert_TK, worker_TK, workers, num_experts))


@compiled
@no_type_check
def _address(expert_TK: ndarray, worker_TK: ndarray, N: int, E: int) -> tuple[ndarray, ...]:
    T, K = expert_TK.shape
    rows_N = np.zeros(N, dtype=np.int64)
    row_TN = np.full((T, N), -1, dtype=np.int64)
    next_NE = np.zeros((N, E), dtype=np.int64)
    for t in range(T):
        for k in range(K):
            n = worker_TK[t, k]
            next_NE[n, expert_TK[t, k]] += 1
            if row_TN[t, n] < 0:
                row_TN[t, n] = rows_N[n]
                rows_N[n] += 1
    counts_NE = next_NE.copy()
    token_Y = np.empty(rows_N.sum(), dtype=np.int64)
    y = c = 0
    for n in range(N):
        for t in range(T):
            if row_TN[t, n] >= 0:
                token_Y[y] = t
                y += 1
        for e in range(E):
            next_NE[n, e], c = c, c + counts_NE[n, e]
    choice_C, row_C = np.empty(T * K, dtype=np.int64), np.empty(T * K, dtype=np.uint32)
    for t in range(T):
        for k in range(K):
            n, e = worker_TK[t, k], expert_TK[t, k]
            choice_C[next_NE[n, e]] = t * K + k
            row_C[next_NE[n, e]] = row_TN[t, n]
            next_NE[n, e] += 1
    return rows_N, token_Y, counts_NE, choice_C, row_C
