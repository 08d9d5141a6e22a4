"""Which worker computes each choice of a token, where experts have copies, and what that does to rows and loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float64, Shaped
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.routing.compiled import compiled

LOAD_CAP = 1.05
"""Highest load of a worker / mean at which a copy is chosen to save rows."""
BATCH_TOKENS = 64
"""Tokens that decode together, where nothing else is known."""


@compiled
@no_type_check
def choose_workers(expert_TK: ndarray, held_NE: ndarray, cap: float) -> ndarray:
    """Return the worker of each choice, `[T, K]`: the only holder, or a copy where the token goes anyway.

    Choices without copies are placed first; then tokens take turns. Among workers below `cap` x mean load a token takes
    one that it visits already, else the one with most of its open choices, then the least loaded; where none is below,
    the least loaded. Ties: lower id. -1 where no worker holds an expert.
    """
    T, K = expert_TK.shape
    N, E = held_NE.shape
    limit = cap * T * K / N
    only_E = np.full(E, -1, dtype=np.int64)  # -2: several
    for e in range(E):
        for n in range(N):
            if held_NE[n, e]:
                only_E[e] = n if only_E[e] == -1 else -2
    worker_TK = np.empty((T, K), dtype=np.int64)
    load_N = np.zeros(N, dtype=np.int64)
    for t in range(T):
        for k in range(K):
            worker_TK[t, k] = only_E[expert_TK[t, k]]
            if worker_TK[t, k] >= 0:
                load_N[worker_TK[t, k]] += 1
    visits_N = np.zeros(N, dtype=np.bool_)
    for t in range(T):
        left = 0
        visits_N[:] = False
        for k in range(K):
            left += worker_TK[t, k] == -2
            if worker_TK[t, k] >= 0:
                visits_N[worker_TK[t, k]] = True
        while left:
            best, most = -1, 0
            for n in range(N):
                gain = 0
                for k in range(K):
                    gain += worker_TK[t, k] == -2 and held_NE[n, expert_TK[t, k]]
                if gain == 0 or load_N[n] >= limit:
                    continue
                gain += K * visits_N[n]
                if gain > most or (gain == most and load_N[n] < load_N[best]):
                    best, most = n, gain
            for k in range(K):
                e, worker = expert_TK[t, k], best
                if worker_TK[t, k] != -2 or (best >= 0 and (load_N[best] >= limit or not held_NE[best, e])):
                    continue
                for n in range(N):
                    if best < 0 and held_NE[n, e] and (worker < 0 or load_N[n] < load_N[worker]):
                        worker = n
                worker_TK[t, k] = worker
                visits_N[worker] = True
                load_N[worker] += 1
                left -= 1
    return worker_TK


@dataclass(frozen=True)
class WorkerTraffic:
    """What tokens do to workers; mean over layers.

    rows_per_token     workers that a token goes to, once each
    busiest_worker     choices of the busiest worker / those of the mean, over all tokens
    busiest_in_batch   the same in a batch of tokens, mean over batches
    """

    rows_per_token: float
    busiest_worker: float
    busiest_in_batch: float


def count_traffic(
    expert_TLK: Shaped[ndarray, "T L K"],
    held_LNE: Bool[ndarray, "L N E"],
    rng: np.random.Generator | None = None,
    *,
    cap: float = LOAD_CAP,
    batch: int = BATCH_TOKENS,
) -> WorkerTraffic:
    """Return rows and loads of tokens that choose copies batch by batch, shuffled by `rng`; None: in their order."""
    order_T = np.arange(len(expert_TLK)) if rng is None else rng.permutation(len(expert_TLK))

    def count(layer: int) -> Float64[ndarray, " 3"]:
        return np.array(_count(expert_TLK[order_T, layer].astype(np.int64), held_LNE[layer], cap, batch))

    return WorkerTraffic(*np.mean(parallel_map(count, len(held_LNE)), axis=0).tolist())


@compiled
@no_type_check
def _count(expert_TK: ndarray, held_NE: ndarray, cap: float, batch: int) -> tuple[float, float, float]:
    """Return the three figures of `WorkerTraffic` of one layer; a last batch that is shorter counts by its tokens."""
    T, K = expert_TK.shape
    N = len(held_NE)
    rows, busiest, load_N = 0, 0, np.zeros(N, dtype=np.int64)
    for first in range(0, T, batch):
        worker_TK = choose_workers(expert_TK[first : first + batch], held_NE, cap)
        batch_N, seen_N = np.zeros(N, dtype=np.int64), np.full(N, -1)
        for t in range(len(worker_TK)):
            for k in range(K):
                n = worker_TK[t, k]
                batch_N[n] += 1
                rows += seen_N[n] != t
                seen_N[n] = t
        load_N += batch_N
        busiest += batch_N.max()
    return rows / T, load_N.max() * N / (T * K), busiest * N / (T * K)
