"""Physical placements of peers with static replicas (EPLB): count copies, choose homes among them, relabel ranks."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from relibra.routing.compiled import compiled


def count_copies(placement_RP: Int[ndarray, "R P"], num_experts: int) -> Int64[ndarray, "R E"]:
    """Return the physical copies of each expert on each rank."""
    copies_RE = np.zeros((len(placement_RP), num_experts), dtype=np.int64)
    rank_X, slot_X = np.nonzero(placement_RP >= 0)
    np.add.at(copies_RE, (rank_X, placement_RP[rank_X, slot_X]), 1)
    return copies_RE


def choose_homes_among_copies(
    copies_RE: Int64[ndarray, "R E"], previous_home_E: Int64[ndarray, " E"], share_E: Float64[ndarray, " E"], slots: int
) -> tuple[Int64[ndarray, " E"], Int64[ndarray, "R E"]]:
    """Choose a home for each expert among the ranks that hold it, with E / R homes on every rank.

    Experts keep their home if possible; the others are matched along augmenting paths. If the placement has no such
    homes (a rank of eight homes may hold the only copies of nine experts), copies of similar load are exchanged.

    copies_RE   copies of each expert on each rank
    share_E     load of one copy
    slots       spare slots of a rank
    returns     homes, and the copies after exchanges
    """
    R, E = copies_RE.shape
    copies_RE = copies_RE.copy()
    stays_E = copies_RE[previous_home_E, np.arange(E)] > 0
    home_E = np.where(stays_E, previous_home_E, -1)
    homes_R = np.bincount(home_E[stays_E], minlength=R)
    needed_R = (copies_RE > 0).sum(axis=1) - slots  # with fewer homes a copy would have no slot
    _match_experts(copies_RE, home_E, homes_R)
    _fill_ranks(copies_RE, home_E, homes_R, needed_R)
    _trade_copies(copies_RE, home_E, homes_R, needed_R, share_E)
    for e in np.flatnonzero(home_E < 0):  # the home takes a wasted slot (two copies of one expert on a rank)
        rank = previous_home_E[e]
        if homes_R[rank] == E // R:
            rank = np.flatnonzero(homes_R < E // R)[0]
        home_E[e] = rank
        homes_R[rank] += 1
    return home_E, copies_RE


@compiled
@no_type_check
def _find_path(e, copies_RE, home_E, homes_R, mover_R, origin_R, queue_R) -> int:
    """Find an augmenting path from expert `e` without home to a rank with room; return that rank or -1.

    mover_R, origin_R   per rank reached, the expert that would move there and the rank it would leave (-1: none)
    """
    R, E = copies_RE.shape
    mover_R[:] = -1
    head, tail = 0, 0
    for r in range(R):
        if copies_RE[r, e] > 0:
            mover_R[r], origin_R[r] = e, -1
            queue_R[tail] = r
            tail += 1
    while head < tail:
        r = queue_R[head]
        head += 1
        if homes_R[r] < E // R:
            return r
        for f in range(E):
            if home_E[f] == r:
                for t in range(R):
                    if mover_R[t] < 0 and copies_RE[t, f] > 0:
                        mover_R[t], origin_R[t] = f, r
                        queue_R[tail] = t
                        tail += 1
    return -1


@compiled
@no_type_check
def _apply_path(r, home_E, mover_R, origin_R) -> None:
    while r >= 0:
        home_E[mover_R[r]] = r
        r = origin_R[r]


@compiled
@no_type_check
def _match_experts(copies_RE, home_E, homes_R) -> None:
    """Assign experts without home to ranks that hold them, along augmenting paths."""
    R, E = copies_RE.shape
    mover_R, origin_R, queue_R = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
    for e in range(E):
        if home_E[e] < 0:
            found = _find_path(e, copies_RE, home_E, homes_R, mover_R, origin_R, queue_R)
            if found >= 0:
                homes_R[found] += 1
                _apply_path(found, home_E, mover_R, origin_R)


@compiled
@no_type_check
def _fill_ranks(copies_RE, home_E, homes_R, needed_R) -> None:
    """Raise ranks to the homes they need, along paths from experts without home or ranks with homes to spare."""
    R, E = copies_RE.shape
    taken_R, origin_R, queue_R = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
    for start in range(R):
        while homes_R[start] < needed_R[start]:
            origin_R[:] = -2  # not reached; -1: the start
            origin_R[start], queue_R[0], head, tail = -1, start, 0, 1
            last, expert = -1, -1
            while head < tail and last < 0:
                r = queue_R[head]
                head += 1
                for f in range(E):
                    if copies_RE[r, f] == 0 or home_E[f] == r:
                        continue
                    t = home_E[f]
                    if t < 0 or (origin_R[t] == -2 and homes_R[t] > needed_R[t]):
                        last, expert = r, f
                        break
                    if origin_R[t] == -2:
                        origin_R[t], taken_R[t] = r, f
                        queue_R[tail] = t
                        tail += 1
            if last < 0:
                break
            if home_E[expert] >= 0:
                homes_R[home_E[expert]] -= 1
            homes_R[start] += 1
            while last >= 0:
                home_E[expert] = last
                expert = taken_R[last]
                last = origin_R[last]


@compiled
@no_type_check
def _trade_copies(copies_RE, home_E, homes_R, needed_R, share_E) -> None:
    """Make room for experts without home: rank r swaps a copy of f for s's copy of x (similar load), as x's home."""
    R, E = copies_RE.shape
    mover_R, origin_R, queue_R = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
    for e in range(E):
        if home_E[e] >= 0:
            continue
        found = _find_path(e, copies_RE, home_E, homes_R, mover_R, origin_R, queue_R)
        if found >= 0:  # an earlier trade has made room
            homes_R[found] += 1
            _apply_path(found, home_E, mover_R, origin_R)
            continue
        best, best_s, best_r, leaves, comes = np.inf, -1, -1, -1, -1
        for r in range(R):
            if homes_R[r] >= needed_R[r]:
                continue
            for f in range(E):
                if copies_RE[r, f] == 0 or home_E[f] == r:
                    continue
                for s in range(R):
                    if mover_R[s] < 0 or copies_RE[s, f] > 0:
                        continue
                    for x in range(E):
                        if (home_E[x] == s or x == e) and copies_RE[s, x] > 0 and abs(share_E[x] - share_E[f]) < best:
                            best, best_s, best_r, leaves, comes = abs(share_E[x] - share_E[f]), s, r, x, f
        if best_s >= 0:
            copies_RE[best_s, leaves] -= 1
            copies_RE[best_r, leaves] += 1
            copies_RE[best_r, comes] -= 1
            copies_RE[best_s, comes] += 1
            home_E[leaves] = best_r
            homes_R[best_r] += 1
            if leaves != e:
                _apply_path(best_s, home_E, mover_R, origin_R)


def relabel_ranks(placement_RP: Int[ndarray, "R P"], before_RX: Int[ndarray, "R X"]) -> Int[ndarray, "R P"]:
    """Return the placement, its rows reordered so that ranks keep most experts: same loads, fewer moves."""
    num_experts = int(max(placement_RP.max(initial=0), before_RX.max(initial=0))) + 1
    held_RE, before_RE = count_copies(placement_RP, num_experts) > 0, count_copies(before_RX, num_experts) > 0
    row_of_rank = linear_sum_assignment(before_RE.astype(np.int64) @ held_RE.T.astype(np.int64), maximize=True)[1]
    return placement_RP[row_of_rank]
