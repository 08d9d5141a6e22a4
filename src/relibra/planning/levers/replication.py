"""Replicas: temporary copies of experts per (micro-batch, layer), their ranks and their token-slots.

Load of a rank above a ceiling `tau` moves to ranks below it. Two greedy methods:

*threshold*   after UltraEP's planner (arXiv 2606.04101): the fullest rank first, its largest expert first, to the
              target with most room, in pieces of at least the remaining excess / number of targets. Few copies.
*chain*       a rank may give away more than its excess if that fills a target exactly, and is then filled from other
              ranks, as in the alias method for sampling (Walker 1977). Each copy fills one rank to the ceiling, so one
              slot per rank is nearly always enough to reach the mean.

A ceiling is searched upwards from the lowest reachable one; feasibility is not monotone, so the best state is kept.
Within a (micro-batch, layer) the fullest node is solved first: the others only need to stay below its final maximum.
If copies may cross nodes, and a node as a whole is too full or its slots do not suffice, chains run inside the nodes
first, then over all ranks.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.routing.compiled import compiled

LOAD, FREE = 0, 1
"""Rows of `state_2R`: load of each rank, and its free slots."""

_NUM_SCORINGS = 4
"""1 to 3 are *chain* with different scores (`score_move`); 0: *threshold* in a node; over nodes the same as 3."""


def replicate(
    load_ME: Int64[ndarray, "M E"],
    home_E: Int[ndarray, " E"],
    num_ranks: int,
    ranks_per_node: int,
    *,
    slots: int,
    tolerance: float = 0.0,
    cross_node: bool = False,
) -> tuple[Int16[ndarray, "M R B"], Int32[ndarray, "M R B"]]:
    """Return the replicas of one layer for each micro-batch.

    home_E      home rank of each expert
    tolerance   excess over the lowest reachable load, as a share of it, that is accepted for fewer copies
    cross_node  also allow replicas on other nodes, if those inside leave a rank above the mean and tolerance
    returns     expert per slot (-1: empty) and its token-slots; never a higher maximum than without replicas
    """
    M = len(load_ME)
    replica_MRB = np.full((M, num_ranks, slots), -1, dtype=np.int16)
    quota_MRB = np.zeros((M, num_ranks, slots), dtype=np.int32)
    if slots and num_ranks > 1:
        order_E = np.argsort(home_E, kind="stable")
        starts = np.searchsorted(home_E[order_E], np.arange(num_ranks + 1))
        home_E = home_E.astype(np.int64)
        load_ME = load_ME.view()
        load_ME.flags.writeable = False  # numba compiles twice for arrays that may be written and those that may not
        _replicate_layer(
            load_ME, home_E, order_E, starts, ranks_per_node, tolerance, cross_node, replica_MRB, quota_MRB
        )
    return replica_MRB, quota_MRB


@compiled
@no_type_check
def _replicate_layer(
    load_ME, home_E, order_E, starts, ranks_per_node, tolerance, cross_node, replica_MRB, quota_MRB
) -> None:
    M, R, B = replica_MRB.shape
    state_2R, held_RB, quota_RB = np.empty((2, R), np.int64), np.empty((R, B), np.int64), np.empty((R, B), np.int64)
    best_2R, best_held_RB, best_quota_RB = state_2R.copy(), held_RB.copy(), quota_RB.copy()
    inside_2R, inside_held_RB, inside_quota_RB = state_2R.copy(), held_RB.copy(), quota_RB.copy()
    for m in range(M):
        load_E = load_ME[m]
        _reset(load_E, order_E, starts, 0, R, state_2R, held_RB, quota_RB)
        before, total, left_E = state_2R[LOAD].max(), load_E.sum(), load_E.copy()
        mean = -(-total // R)
        relaxed = max(mean, int(total / R * (1 + tolerance)))
        _solve_inside_nodes(
            load_E, order_E, starts, ranks_per_node, tolerance, relaxed if cross_node else np.int64(-1),
            state_2R, held_RB, quota_RB, left_E, best_2R, best_held_RB, best_quota_RB,
        )  # fmt: skip
        inside = state_2R[LOAD].max()
        if cross_node and ranks_per_node < R and inside > relaxed:
            inside_2R[:], inside_held_RB[:], inside_quota_RB[:] = state_2R, held_RB, quota_RB
            _reset(load_E, order_E, starts, 0, R, state_2R, held_RB, quota_RB)
            _solve(
                load_E, order_E, starts, np.int64(0), R, ranks_per_node, relaxed,  # 0 would compile it twice
                state_2R, held_RB, quota_RB, left_E, best_2R, best_held_RB, best_quota_RB,
            )  # fmt: skip
            if state_2R[LOAD].max() >= inside:
                state_2R[:], held_RB[:], quota_RB[:] = inside_2R, inside_held_RB, inside_quota_RB
        if state_2R[LOAD].max() < before:
            _prune(home_E, state_2R, held_RB, quota_RB)
            for r in range(R):
                replica_MRB[m, r] = held_RB[r]
                quota_MRB[m, r] = quota_RB[r]


@compiled
@no_type_check
def _solve_inside_nodes(
    load_E, order_E, starts, ranks_per_node, tolerance, most,
    state_2R, held_RB, quota_RB, left_E, best_2R, best_held_RB, best_quota_RB,
) -> None:  # fmt: skip
    """Lower every node towards its mean, the fullest first: the others need not get below it.

    most   where copies may cross nodes: the ceiling of all nodes, from the mean of all ranks; else -1
    """
    R, G = state_2R.shape[1], ranks_per_node
    node_N = np.empty(R // G, np.int64)
    for node in range(R // G):
        node_N[node] = state_2R[LOAD, node * G : (node + 1) * G].sum()
    if most >= 0 and -(-node_N.max() // G) > most:
        return  # one node is too full as a whole
    top = 0
    for node in np.argsort(-node_N, kind="mergesort"):
        lowest = -(-node_N[node] // G)
        ceiling = max(top, lowest, most if most >= 0 else int(node_N[node] / G * (1 + tolerance)))
        _solve(
            load_E, order_E, starts, node * G, (node + 1) * G, G, ceiling,
            state_2R, held_RB, quota_RB, left_E, best_2R, best_held_RB, best_quota_RB,
        )  # fmt: skip
        top = max(top, state_2R[LOAD, node * G : (node + 1) * G].max())


@compiled
@no_type_check
def _reset(load_E, order_E, starts, low, high, state_2R, held_RB, quota_RB) -> None:
    """Remove all replicas of ranks low..high."""
    for r in range(low, high):
        state_2R[LOAD, r] = 0
        state_2R[FREE, r] = held_RB.shape[1]
        held_RB[r] = -1
        quota_RB[r] = 0
        for i in range(starts[r], starts[r + 1]):
            state_2R[LOAD, r] += load_E[order_E[i]]


@compiled
@no_type_check
def _solve(
    load_E, order_E, starts, low, high, ranks_per_node, ceiling,
    state_2R, held_RB, quota_RB, left_E, best_2R, best_held_RB, best_quota_RB,
) -> None:  # fmt: skip
    """Lower the maximum of ranks low..high to `ceiling` or as near as found; `state_2R` is updated.

    Of the scorings that reach a ceiling the one with fewest copies counts; with one slot per rank they hardly differ.
    """
    best, best_free = state_2R[LOAD, low:high].max(), state_2R[FREE, low:high].sum()
    if best <= ceiling:
        return
    best_2R[:, low:high], best_held_RB[low:high], best_quota_RB[low:high] = state_2R[:, low:high], -1, 0
    failed, step, tau = ceiling - 1, 1, ceiling
    while failed < tau < best:
        reached = False
        for scoring in range(_NUM_SCORINGS - (high - low > ranks_per_node)):  # over nodes the last is as the first
            _reset(load_E, order_E, starts, low, high, state_2R, held_RB, quota_RB)
            for i in range(starts[low], starts[high]):
                left_E[order_E[i]] = load_E[order_E[i]]
            _try_scoring(order_E, starts, low, high, ranks_per_node, tau, scoring, state_2R, held_RB, quota_RB, left_E)
            top, free = max(state_2R[LOAD, low:high].max(), ceiling), state_2R[FREE, low:high].sum()
            if top < best or (top == best and free > best_free):
                best, best_free = top, free
                best_2R[:, low:high] = state_2R[:, low:high]
                best_held_RB[low:high], best_quota_RB[low:high] = held_RB[low:high], quota_RB[low:high]
            reached = reached or top <= tau
            if reached and held_RB.shape[1] == 1:
                break
        if reached and tau == ceiling:
            break
        if reached:
            tau = (failed + tau) // 2  # between the last failure and this success
        else:
            failed = tau
            tau = min(tau + step, (failed + best) // 2)
            step *= 2
    state_2R[:, low:high] = best_2R[:, low:high]
    held_RB[low:high], quota_RB[low:high] = best_held_RB[low:high], best_quota_RB[low:high]


@compiled
@no_type_check
def _try_scoring(order_E, starts, low, high, ranks_per_node, tau, scoring, state_2R, held_RB, quota_RB, left_E) -> None:
    """Lower ranks low..high towards `tau` with *threshold*, or *chain* and one scoring."""
    if scoring == 0 and high - low <= ranks_per_node:
        _threshold(order_E, starts, low, high, tau, state_2R, held_RB, quota_RB, left_E)
        return
    for node in range(low, high, ranks_per_node):
        _chain(order_E, starts, node, node + ranks_per_node, tau, scoring, state_2R, held_RB, quota_RB, left_E)
    if high - low > ranks_per_node:
        _chain(order_E, starts, low, high, tau, scoring, state_2R, held_RB, quota_RB, left_E)


@compiled
@no_type_check
def _threshold(order_E, starts, low, high, tau, state_2R, held_RB, quota_RB, left_E) -> None:
    """Move the excess over `tau` of ranks low..high to ranks below (UltraEP, dynamic floor)."""
    load_R, free_R = state_2R[LOAD], state_2R[FREE]
    for s in low + np.argsort(-load_R[low:high], kind="mergesort"):
        need = load_R[s] - tau
        if need <= 0:
            return
        experts = order_E[starts[s] : starts[s + 1]]
        for e in experts[np.argsort(-left_E[experts], kind="mergesort")]:
            while need > 0 and left_E[e] > 0:
                candidates = 0
                for t in range(low, high):
                    candidates += load_R[t] < tau and free_R[t] > 0
                if candidates == 0:
                    return
                floor, best = -(-need // candidates), -1
                for t in range(low, high):
                    if load_R[t] >= tau or free_R[t] == 0 or slot_of(e, held_RB[t]) >= 0:
                        continue
                    if min(need, tau - load_R[t], left_E[e]) >= floor and (best < 0 or load_R[t] < load_R[best]):
                        best = t
                if best < 0:
                    break
                x = min(need, tau - load_R[best], left_E[e])
                _move_tokens(e, s, best, x, state_2R, held_RB, quota_RB, left_E)
                need -= x
            if need == 0:
                break
        if need > 0:
            return


@compiled
@no_type_check
def _chain(order_E, starts, low, high, tau, scoring, state_2R, held_RB, quota_RB, left_E) -> None:
    """Lower ranks low..high to `tau` with moves that fill a target exactly or clear a source, if possible."""
    load_R, free_R = state_2R[LOAD], state_2R[FREE]
    while True:
        s = low
        for r in range(low + 1, high):
            if load_R[r] > load_R[s]:
                s = r
        excess = load_R[s] - tau
        if excess <= 0:
            return
        best_score, best_e, best_t, best_x = 0, -1, -1, 0
        for i in range(starts[s], starts[s + 1]):
            e = order_E[i]
            if left_E[e] == 0:
                continue
            for t in range(low, high):
                room = tau - load_R[t]
                if room <= 0:
                    continue
                x = min(excess, room, left_E[e])
                if slot_of(e, held_RB[t]) >= 0:
                    score = 4 * tau + x  # costs no slot
                elif free_R[t] == 0:
                    continue
                else:
                    if left_E[e] >= room and free_R[s] > 0:
                        x = room
                    score = score_move(scoring, x, excess, room, left_E[e], tau)
                if score > best_score:
                    best_score, best_e, best_t, best_x = score, e, t, x
        if best_e < 0:
            return
        _move_tokens(best_e, s, best_t, best_x, state_2R, held_RB, quota_RB, left_E)


@compiled
@no_type_check
def score_move(scoring, x, excess, room, left, tau) -> int:
    """Score a move of `x` tokens that needs a new slot; above 0, below 4 tau."""
    if scoring == 1:  # the largest useful move, exact fills first
        return min(x, excess) + (tau // 2 if x == room else 0)
    if x != room:
        return min(x, tau)
    if scoring == 2:  # the smallest room first: the room left is on few ranks
        return 3 * tau - room
    return max(2 * tau, 4 * tau - left) - 1  # the smallest expert that fills


@compiled
@no_type_check
def slot_of(expert, held_B) -> int:
    """Return the slot that holds `expert`, or -1; with expert = -1, the first empty slot."""
    for b in range(len(held_B)):
        if held_B[b] == expert:
            return b
    return -1


@compiled
@no_type_check
def _move_tokens(e, source, target, x, state_2R, held_RB, quota_RB, left_E) -> None:
    """Move `x` token-slots of `e` from its home to a replica, in a new slot if there is none yet."""
    b = slot_of(e, held_RB[target])
    if b < 0:
        b = slot_of(-1, held_RB[target])
        held_RB[target, b] = e
        state_2R[FREE, target] -= 1
    quota_RB[target, b] += x
    state_2R[LOAD, target] += x
    state_2R[LOAD, source] -= x
    left_E[e] -= x


@compiled
@no_type_check
def _prune(home_E, state_2R, held_RB, quota_RB) -> None:
    """Drop replicas, smallest first, whose tokens fit on their home without a higher maximum."""
    B = held_RB.shape[1]
    load_R = state_2R[LOAD]
    top = load_R.max()
    for i in np.argsort(quota_RB.ravel(), kind="mergesort"):
        r, b = i // B, i % B
        if held_RB[r, b] >= 0 and load_R[home_E[held_RB[r, b]]] + quota_RB[r, b] <= top:
            load_R[home_E[held_RB[r, b]]] += quota_RB[r, b]
            load_R[r] -= quota_RB[r, b]
            held_RB[r, b], quota_RB[r, b] = -1, 0
