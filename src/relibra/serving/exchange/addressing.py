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
    row_C       row of each choice, counted from the first row of its worker
    """

    rows_N: ndarray
    token_Y: ndarray
    counts_NE: ndarray
    choice_C: ndarray
    row_C: ndarray


@compiled
@no_type_check
def address_choices(expert_TK: ndarray, worker_TK: ndarray, workers: int, num_experts: int) -> Addressed:
    """Return the rows of each worker from the experts of tokens and the worker of each choice."""
    T, K = expert_TK.shape
    rows_N, row_TN = np.zeros(workers, dtype=np.int64), np.full((T, workers), -1, dtype=np.int64)
    counts_NE = np.zeros((workers, num_experts), dtype=np.int64)
    for t in range(T):
        for k in range(K):
            n = worker_TK[t, k]
            counts_NE[n, expert_TK[t, k]] += 1
            if row_TN[t, n] < 0:
                row_TN[t, n] = rows_N[n]
                rows_N[n] += 1
    token_Y = np.empty(rows_N.sum(), dtype=np.int64)
    first_N = np.cumsum(rows_N) - rows_N
    next_X = np.cumsum(counts_NE) - counts_NE.ravel()  # place of the next choice of each (worker, expert)
    choice_C, row_C = np.empty(T * K, dtype=np.int64), np.empty(T * K, dtype=np.uint32)
    for t in range(T):
        for k in range(K):
            n = worker_TK[t, k]
            token_Y[first_N[n] + row_TN[t, n]] = t
            pair = n * num_experts + expert_TK[t, k]
            choice_C[next_X[pair]], row_C[next_X[pair]] = t * K + k, row_TN[t, n]
            next_X[pair] += 1
    return Addressed(rows_N, token_Y, counts_NE, choice_C, row_C)
