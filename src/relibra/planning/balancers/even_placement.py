"""Static placement for an even split of tokens over copies; `relibra.eplb` uses it.

Replicas go to the experts with most load per copy; copies are placed heaviest first on ranks without the expert; then
copies of different ranks are exchanged while the busiest rank's load, summed over times, falls. Times are steps or
micro-batches; from 17 on, consecutive ones are added: at most 16 remain.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int64, Shaped
from numpy import ndarray

from relibra.planning.balancers.physical_placement import count_copies
from relibra.planning.baselines.eplb import eplb_placement
from relibra.routing.compiled import compiled

MAX_TIMES = 16
EXCHANGES = 400
"""Most exchanges from one start are this / T, where `load_TE` has T times: the cost of an exchange grows with T."""


def even_placement(load_TE: Shaped[ndarray, "T E"], num_ranks: int, per_rank: int) -> Int64[ndarray, "R P"]:
    """Return the expert of each slot of one layer; never worse than EPLB under an even split.

    load_TE    load of each expert at each time, any unit
    per_rank   slots of a rank; all are filled. No expert is twice on a rank, unless experts are too few or (rarely)
               EPLB's placement with a repeat is better
    """
    T, E = load_TE.shape
    load_TE = load_TE.astype(np.float64)
    if T > MAX_TIMES:
        load_TE = np.add.reduceat(load_TE, np.arange(0, T, -(-T // MAX_TIMES)), axis=0)
    total_E = load_TE.sum(axis=0)
    dealt_RP = _longest_first(total_E, _count_copies(total_E, num_ranks * per_rank, num_ranks), num_ranks, per_rank)
    eplb_RP = eplb_placement(total_E, num_ranks * per_rank, 1, 1, num_ranks)[0].reshape(num_ranks, per_rank)
    starts = [dealt_RP, eplb_RP.copy()]
    for start_RP in starts:
        share_TE = load_TE / np.bincount(start_RP.ravel(), minlength=E)
        load_TR = share_TE[:, start_RP].sum(axis=2)
        _separate_copies(share_TE, start_RP, load_TR)
        _exchange(share_TE, start_RP, load_TR, EXCHANGES // len(load_TE))
    costs = [busiest_rank(load_TE, placement_RP) for placement_RP in (*starts, eplb_RP)]
    return (*starts, eplb_RP)[int(np.argmin(costs))]


def busiest_rank(load_TE: Shaped[ndarray, "T E"], placement_RP: Int64[ndarray, "R P"]) -> float:
    """Return the sum over times of the load of the busiest rank under an even split."""
    copies_RE = count_copies(placement_RP, load_TE.shape[1])
    return float(((load_TE / copies_RE.sum(axis=0)) @ copies_RE.T).max(axis=1).sum())


@compiled
@no_type_check
def _count_copies(load_E, num_slots, num_ranks) -> ndarray:
    """Return copies per expert: slots go to most load per copy, to experts not on all ranks if any (ties: lower id)."""
    E = len(load_E)
    count_E = np.ones(E, np.int64)
    for x in range(num_slots - E):
        best, no_limit = -1, max(num_ranks, x + 2)  # no expert has more than x + 1 copies
        for most in (num_ranks, no_limit):
            for e in range(E):
                if count_E[e] < most and (best < 0 or load_E[e] * count_E[best] > load_E[best] * count_E[e]):
                    best = e
            if best >= 0:
                break
        count_E[best] += 1
    return count_E


@compiled
@no_type_check
def _longest_first(load_E, count_E, num_ranks, per_rank) -> ndarray:
    """Place copies by falling share on the lightest rank with room and without the expert."""
    placement_RP = np.full((num_ranks, per_rank), -1, np.int64)
    filled_R, total_R = np.zeros(num_ranks, np.int64), np.zeros(num_ranks)
    for e in np.argsort(-load_E / count_E, kind="mergesort"):
        for _ in range(count_E[e]):
            best, held_best = -1, True
            for r in range(num_ranks):
                if filled_R[r] < per_rank:
                    held = _holds(placement_RP[r], e)
                    if best < 0 or (held_best and not held) or (held == held_best and total_R[r] < total_R[best]):
                        best, held_best = r, held
            placement_RP[best, filled_R[best]] = e
            filled_R[best] += 1
            total_R[best] += load_E[e] / count_E[e]
    return placement_RP


@compiled
@no_type_check
def _separate_copies(share_TE, placement_RP, load_TR) -> None:
    """Exchange each duplicate of an expert on a rank for the copy elsewhere that leaves the fuller rank least full."""
    R, P = placement_RP.shape
    share_E, load_R = share_TE.sum(axis=0), load_TR.sum(axis=0)
    for a in range(R):
        for i in range(P):
            e = placement_RP[a, i]
            if not _holds(placement_RP[a, :i], e):
                continue
            best, best_b, best_j = np.inf, -1, -1
            for b in range(R):
                if _holds(placement_RP[b], e):
                    continue
                for j in range(P):
                    f = placement_RP[b, j]
                    worse = max(load_R[a] - share_E[e] + share_E[f], load_R[b] + share_E[e] - share_E[f])
                    if worse < best and not _holds(placement_RP[a], f):
                        best, best_b, best_j = worse, b, j
            if best_b >= 0:
                _swap(a, i, best_b, best_j, share_TE, placement_RP, load_TR)
                load_R = load_TR.sum(axis=0)


@compiled
@no_type_check
def _swap(a, i, b, j, share_TE, placement_RP, load_TR) -> None:
    e, f = placement_RP[a, i], placement_RP[b, j]
    placement_RP[a, i], placement_RP[b, j] = f, e
    load_TR[:, a] += share_TE[:, f] - share_TE[:, e]
    load_TR[:, b] += share_TE[:, e] - share_TE[:, f]


@compiled
@no_type_check
def _holds(row_P, e) -> bool:
    found = False
    for f in row_P:
        found = found or f == e
    return found


@compiled
@no_type_check
def _exchange(share_TE, placement_RP, load_TR, rounds) -> None:
    """Exchange a copy on a rank that is busiest at some time for one elsewhere: the best pair, while one improves."""
    T, R = load_TR.shape
    P = placement_RP.shape[1]
    tops_T3, critical_R = np.empty((T, 3), np.int64), np.zeros(R, np.bool_)
    for _ in range(rounds):
        critical_R[:] = False
        now = 0.0
        for t in range(T):
            _three_busiest(load_TR[t], tops_T3[t])
            critical_R[tops_T3[t, 0]] = True
            now += load_TR[t, tops_T3[t, 0]]
        best, best_a, best_i, best_b, best_j = now * (1 - 1e-9), -1, -1, -1, -1
        for a in np.flatnonzero(critical_R):
            for b in range(R):
                if b == a:
                    continue
                for i in range(P):
                    e = placement_RP[a, i]
                    for j in range(P):
                        f = placement_RP[b, j]
                        after = 0.0
                        for t in range(T):
                            d = share_TE[t, e] - share_TE[t, f]
                            x = 0
                            while x < 2 and (tops_T3[t, x] == a or tops_T3[t, x] == b):
                                x += 1
                            other = tops_T3[t, x]
                            rest = load_TR[t, other] if other != a and other != b else 0.0
                            after += max(rest, load_TR[t, a] - d, load_TR[t, b] + d)
                            if after >= best:
                                break
                        if after < best and not _holds(placement_RP[b], e) and not _holds(placement_RP[a], f):
                            best, best_a, best_i, best_b, best_j = after, a, i, b, j
        if best_a < 0:
            return
        _swap(best_a, best_i, best_b, best_j, share_TE, placement_RP, load_TR)


@compiled
@no_type_check
def _three_busiest(load_R, tops_3) -> None:
    """Write the three busiest ranks to `tops_3`; with fewer ranks, the busiest again."""
    order = np.argsort(-load_R, kind="mergesort")
    for x in range(3):
        tops_3[x] = order[x] if x < len(order) else order[0]
