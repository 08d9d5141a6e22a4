"""Experts that are picked together, on one worker, under a cap on the load of each worker; and copies of some.

A token goes to a worker once, whatever it needs there, so rows fall where experts that tokens pick together share a
worker. Such experts also rise and fall together: hence the cap. Attention workers hold no experts, so every worker that
a token visits counts. Co-activation placement is a known family (measured in arXiv 2604.23150); copies on spare slots
are MegaScale-Infer's (arXiv 2504.02263), here of each layer apart.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Int64, Shaped
from numpy import ndarray

from relibra.errors import PlanError
from relibra.parallel_map import parallel_map
from relibra.planning.deployment.worker_choice import LOAD_CAP, choose_workers
from relibra.routing.compiled import compiled

STARTS, FEW_EXPERTS = 4, 64
"""Searches, of which the one with the fewest rows is kept; with fewer experts, in proportion more."""
SOFT_PRICE = 0.5
"""Rows that a choice above the cap may save at first: few swaps lead from one placement below the cap to the next."""
_SWEEPS = 20
"""Most passes over all pairs; a pass without a swap ends a search."""
_MOST_TOKENS = 1 << 15
"""Tokens that a search looks at; of more, evenly spaced ones."""


def place_by_number(num_experts: int, workers: int) -> Int64[ndarray, " E"]:
    """Return the worker of each expert, in runs; the first workers take the remainder.

    raises   PlanError for fewer than one worker, or more than experts

    >>> place_by_number(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    if not 1 <= workers <= num_experts:
        raise PlanError(f"--experts {workers}: at least 1 and at most {num_experts} workers hold {num_experts} experts")
    return np.sort(np.arange(num_experts) % workers)


def place_balanced(load_E: Shaped[ndarray, " E"], workers: int) -> Int64[ndarray, " E"]:
    """Return workers of experts by load alone: heaviest first, to the lightest worker with room; ties: lower id."""
    room_N, load_N = np.full(workers, -(-len(load_E) // workers)), np.zeros(workers)
    worker_E = np.zeros(len(load_E), dtype=np.int64)
    for expert in np.argsort(-load_E, kind="stable"):
        worker = worker_E[expert] = np.argmin(np.where(room_N > 0, load_N, np.inf))
        room_N[worker] -= 1
        load_N[worker] += load_E[expert]
    return worker_E


def place_together(
    expert_TK: Shaped[ndarray, "T K"],
    num_experts: int,
    workers: int,
    rng: np.random.Generator,
    *,
    cap: float = LOAD_CAP,
    starts: int = STARTS,
) -> Int64[ndarray, " E"]:
    """Return workers of experts such that tokens visit few of them: swaps and moves from the balanced placement.

    A swap is made where it lowers the rows of all tokens and leaves both workers at `cap` x mean load or less, or at
    that of the busiest worker of the start if it is higher. Further searches begin at random, and may cross the cap.

    expert_TK   choices in one layer; those of a row differ
    """
    tokens, top_k = expert_TK.shape
    load_E = np.bincount(expert_TK.ravel(), minlength=num_experts)
    worker_E = place_balanced(load_E, workers)
    # Free room is an expert without tokens: a swap with it is a move. Too little for a worker without experts.
    slots = -(-num_experts // workers)
    room_N = slots - np.bincount(worker_E, minlength=workers)
    worker_P = np.concatenate([worker_E, np.repeat(np.arange(workers), room_N)[: slots - 1]])
    load_P = np.pad(load_E, (0, len(worker_P) - num_experts))
    limit = max(cap * load_E.sum() / workers, np.bincount(worker_P, load_P, workers).max())
    token_Y = np.argsort(expert_TK.ravel(), kind="stable") // top_k
    picks_TP = np.zeros((tokens, len(worker_P)), dtype=np.bool_)
    picks_TP[np.arange(tokens)[:, None], expert_TK] = True
    best_P, fewest = worker_P, tokens * workers + 1
    for start in range(starts * -(-FEW_EXPERTS // num_experts)):
        order_P = rng.permutation(len(worker_P)) if start else np.arange(len(worker_P))
        found_P = rng.permutation(worker_P) if start else worker_P.copy()
        visits_TN = np.zeros((tokens, workers), dtype=np.int16)
        np.add.at(visits_TN, (np.arange(tokens)[:, None], found_P[expert_TK]), 1)
        for price in (SOFT_PRICE, tokens * top_k) if start else (tokens * top_k,):
            load_N = _swap(found_P, visits_TN, order_P, load_P, token_Y, picks_TP, limit, price)
        if load_N.max() <= limit and (rows := int(np.count_nonzero(visits_TN))) < fewest:
            best_P, fewest = found_P, rows
    return best_P[:num_experts]


@compiled
@no_type_check
def _swap(
    worker_P: ndarray,
    visits_TN: ndarray,
    order_P: ndarray,
    load_P: ndarray,
    token_Y: ndarray,
    picks_TP: ndarray,
    limit: float,
    price: float,
) -> ndarray:
    """Swap workers in place while that lowers rows + `price` x choices above the limit; return loads of workers.

    visits_TN   choices of each token at each worker, kept up
    """
    P, N = len(worker_P), visits_TN.shape[1]
    first_P = np.cumsum(load_P) - load_P
    load_N = np.zeros(N, dtype=np.int64)
    for p in range(P):
        load_N[worker_P[p]] += load_P[p]
    for _ in range(_SWEEPS):
        swapped = False
        for i in range(P):
            for j in range(i + 1, P):
                e, f = order_P[i], order_P[j]
                a, b = worker_P[e], worker_P[f]
                shift = load_P[f] - load_P[e]
                if a == b:
                    continue
                change = price * (
                    max(0.0, load_N[a] + shift - limit)
                    - max(0.0, load_N[a] - limit)
                    + max(0.0, load_N[b] - shift - limit)
                    - max(0.0, load_N[b] - limit)
                )
                if change > load_P[e] + load_P[f]:
                    continue
                for one, other, source, target in ((e, f, a, b), (f, e, b, a)):
                    for y in range(first_P[one], first_P[one] + load_P[one]):
                        t = token_Y[y]
                        if not picks_TP[t, other]:
                            change += (visits_TN[t, target] == 0) - (visits_TN[t, source] == 1)
                if change >= 0:
                    continue
                for one, source, target in ((e, a, b), (f, b, a)):
                    for y in range(first_P[one], first_P[one] + load_P[one]):
                        visits_TN[token_Y[y], source] -= 1
                        visits_TN[token_Y[y], target] += 1
                worker_P[e], worker_P[f] = b, a
                load_N[a] += shift
                load_N[b] -= shift
                swapped = True
        if not swapped:
            break
    return load_N


def add_copies(
    expert_TK: Shaped[ndarray, "T K"], home_NE: Bool[ndarray, "N E"], spare: int, *, cap: float = LOAD_CAP
) -> Bool[ndarray, "N E"]:
    """Return what workers hold with up to `spare` copies each, given one after another to where most rows fall away.

    A copy saves the row of a token that visits its worker and goes to another one for this expert alone; ties: lower
    worker, then expert. Copies that save none are not made.
    """
    held_NE, room_N = home_NE.copy(), np.full(len(home_NE), spare)
    for _ in range(spare * len(home_NE)):
        saved_NE = _rows_saved(expert_TK, choose_workers(expert_TK, held_NE, cap), held_NE)
        saved_NE[room_N == 0] = 0
        worker, expert = np.unravel_index(saved_NE.argmax(), saved_NE.shape)
        if not saved_NE[worker, expert]:
            break
        held_NE[worker, expert] = True
        room_N[worker] -= 1
    return held_NE


@compiled
@no_type_check
def _rows_saved(expert_TK: ndarray, worker_TK: ndarray, held_NE: ndarray) -> ndarray:
    """Return the rows that one more copy would save, by worker and expert."""
    N, K = len(held_NE), expert_TK.shape[1]
    saved_NE = np.zeros(held_NE.shape, dtype=np.int64)
    visits_N = np.zeros(N, dtype=np.int64)
    for t in range(len(expert_TK)):
        visits_N[:] = 0
        for k in range(K):
            visits_N[worker_TK[t, k]] += 1
        for k in range(K):
            if visits_N[worker_TK[t, k]] == 1:
                for n in range(N):
                    if visits_N[n] and not held_NE[n, expert_TK[t, k]]:
                        saved_NE[n, expert_TK[t, k]] += 1
    return saved_NE


def plan_placements(
    expert_TLK: Shaped[ndarray, "T L K"], num_experts: int, workers: int, *, spare: int, cap: float, seed: int = 0
) -> dict[str, Bool[ndarray, "L N E"]]:
    """Return what workers hold in each layer, by the name of the way: each way of placing experts, the best one last.

    raises   PlanError as `place_by_number` does, and for more spare experts than there are others
    """
    number_E, id_N = place_by_number(num_experts, workers), np.arange(workers)[:, None]
    if spare and (workers < 2 or spare > num_experts - -(-num_experts // workers)):
        raise PlanError(
            f"--spare-experts {spare} on {workers} workers: two copies on one worker of {num_experts} experts are of "
            "no use; use more workers or fewer spare experts"
        )
    expert_LTK = np.ascontiguousarray(expert_TLK[:: -(-len(expert_TLK) // _MOST_TOKENS)].transpose(1, 0, 2))

    def plan(layer: int) -> tuple[Bool[ndarray, "N E"], ...]:
        expert_TK = expert_LTK[layer]
        load_E, rng = np.bincount(expert_TK.ravel(), minlength=num_experts), np.random.default_rng([seed, layer])
        home_NE = place_together(expert_TK, num_experts, workers, rng, cap=cap) == id_N
        copies = (add_copies(expert_TK, home_NE, spare, cap=cap),) if spare else ()
        return number_E == id_N, place_balanced(load_E, workers) == id_N, home_NE, *copies

    names = ("by number", "balance only", "picked together", "with copies")
    return dict(zip(names, map(np.stack, zip(*parallel_map(plan, len(expert_LTK)), strict=True)), strict=False))
