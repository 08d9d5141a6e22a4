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
"""Searches for 64 experts or more, in proportion more for fewer; the result with the fewest rows is kept."""
SOFT_PRICE = 0.5
"""Rows that a choice above the cap costs at first: a hard cap would leave few swaps between placements below it."""
_SWEEPS = 20
"""Most passes over all pairs; a pass without a swap ends a search."""
_MOST_TOKENS = 1 << 15
"""Tokens that a search looks at; of more, evenly spaced ones."""


def place_by_number(num_experts: int, workers: int, spare: int = 0) -> Bool[ndarray, "N E"]:
    """Return the experts of each worker, in runs; the first workers take the remainder.

    raises   PlanError for more workers than experts, and for more spare experts than there are others

    >>> place_by_number(5, 2).astype(int).tolist()
    [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    """
    if not 1 <= workers <= num_experts:
        raise PlanError(
            f"--experts {workers} is more than the {num_experts} experts of a layer: use at most {num_experts} workers"
        )
    slots = -(-num_experts // workers) + spare
    if spare and (slots > num_experts or workers < 2):
        raise PlanError(
            f"--spare-experts {spare} on {workers} workers: a worker then holds {slots} of {num_experts} experts, and "
            "two copies on one worker are of no use; use more workers or fewer spare experts"
        )
    return np.sort(np.arange(num_experts) % workers) == np.arange(workers)[:, None]


def place_balanced(load_E: Shaped[ndarray, " E"], workers: int) -> Int64[ndarray, " E"]:
    """Return workers of experts by load alone: heaviest first, one to each, then to the lightest with room."""
    room_N, load_N = np.full(workers, -(-len(load_E) // workers)), np.zeros(workers)
    worker_E = np.zeros(len(load_E), dtype=np.int64)
    for number, expert in enumerate(np.argsort(-load_E, kind="stable")):
        worker = worker_E[expert] = number if number < workers else np.argmin(np.where(room_N > 0, load_N, np.inf))
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

    A swap is made where it lowers the rows of all tokens and leaves both workers at the limit or below: `cap` x mean
    load, or the busiest worker's load at the start if higher. Further searches begin at random and may cross it first.

    expert_TK   choices in one layer; those of a row differ
    """
    expert_TK, slots = np.ascontiguousarray(expert_TK, dtype=np.int64), -(-num_experts // workers)
    load_E = np.bincount(expert_TK.ravel(), minlength=num_experts)
    worker_E = place_balanced(load_E, workers)
    # Free room is like an expert without tokens: a swap with it is a move.
    room_Y = np.repeat(np.arange(workers), slots - np.bincount(worker_E, minlength=workers))
    start_P = np.concatenate([worker_E, room_Y])
    limit = max(cap * expert_TK.size / workers, np.bincount(worker_E, load_E, workers).max())
    best_P, fewest = start_P, expert_TK.size + 1
    for number in range(starts * -(-FEW_EXPERTS // num_experts)):
        order_P, found_P = np.arange(len(start_P)), start_P.copy()
        if number:
            order_P, found_P[:num_experts] = rng.permutation(order_P), rng.permutation(worker_E)
            _swap(found_P, expert_TK, order_P, num_experts, workers, limit, SOFT_PRICE)
        rows, busiest = _swap(found_P, expert_TK, order_P, num_experts, workers, limit, float(expert_TK.size))
        if busiest <= limit and rows < fewest:
            best_P, fewest = found_P, rows
    return best_P[:num_experts]


@compiled
@no_type_check
def _swap(
    worker_P: ndarray, expert_TK: ndarray, order_P: ndarray, E: int, N: int, limit: float, price: float
) -> tuple[int, int]:
    """Swap experts in place while that lowers rows + `price` x choices above the limit; no worker loses its last one.

    returns   rows of all tokens, choices of the busiest worker
    """
    (T, K), P = expert_TK.shape, len(worker_P)
    load_P, load_N = np.bincount(expert_TK.ravel(), minlength=P), np.zeros(N, dtype=np.int64)
    token_Y, first_P = np.argsort(expert_TK.ravel(), kind="mergesort") // K, np.cumsum(load_P) - load_P
    picks_TP, visits_TN = np.zeros((T, P), dtype=np.bool_), np.zeros((T, N), dtype=np.int16)
    experts_N = np.bincount(worker_P[:E], minlength=N)
    for p in range(P):
        load_N[worker_P[p]] += load_P[p]
    for t in range(T):
        for k in range(K):
            picks_TP[t, expert_TK[t, k]] = True
            visits_TN[t, worker_P[expert_TK[t, k]]] += 1
    for _ in range(_SWEEPS):
        swapped = False
        for i in range(P):
            for j in range(i + 1, P):
                e, f = order_P[i], order_P[j]
                a, b = worker_P[e], worker_P[f]
                shift, gained = load_P[f] - load_P[e], int(f < E) - int(e < E)
                above = max(0.0, load_N[a] + shift - limit) + max(0.0, load_N[b] - shift - limit)
                change = price * (above - max(0.0, load_N[a] - limit) - max(0.0, load_N[b] - limit))
                if a == b or change > load_P[e] + load_P[f] or min(experts_N[a] + gained, experts_N[b] - gained) < 1:
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
                experts_N[a] += gained
                experts_N[b] -= gained
                swapped = True
        if not swapped:
            break
    return (visits_TN > 0).sum(), load_N.max()


def add_row_copies(
    expert_TK: Shaped[ndarray, "T K"], home_NE: Bool[ndarray, "N E"], spare: int, *, cap: float = LOAD_CAP
) -> Bool[ndarray, "N E"]:
    """Return what workers hold with up to `spare` copies each, every next one where it saves most rows.

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
    expert_TLK: Shaped[ndarray, "T L K"],
    num_experts: int,
    workers: int,
    *,
    spare: int,
    cap: float,
    seed: int = 0,
    starts: int = STARTS,
) -> dict[str, Bool[ndarray, "L N E"]]:
    """Return what workers hold in each layer, by the name of the way of placing experts, the best one last.

    raises   PlanError as `place_by_number` does
    """
    number_NE, id_N = place_by_number(num_experts, workers, spare), np.arange(workers)[:, None]
    expert_LTK = expert_TLK[:: -(-len(expert_TLK) // _MOST_TOKENS) or 1].transpose(1, 0, 2).astype(np.int64, order="C")

    def plan(layer: int) -> tuple[Bool[ndarray, "N E"], ...]:
        expert_TK = expert_LTK[layer]
        load_E, rng = np.bincount(expert_TK.ravel(), minlength=num_experts), np.random.default_rng([seed, layer])
        home_NE = place_together(expert_TK, num_experts, workers, rng, cap=cap, starts=starts) == id_N
        copies = (add_row_copies(expert_TK, home_NE, spare, cap=cap),) if spare else ()
        return number_NE, place_balanced(load_E, workers) == id_N, home_NE, *copies

    names = ("by number", "balance only", "picked together", "with copies")
    return dict(zip(names, map(np.stack, zip(*parallel_map(plan, len(expert_LTK)), strict=True)), strict=False))
