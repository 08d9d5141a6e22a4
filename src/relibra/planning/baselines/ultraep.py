"""UltraEP's planner (arXiv 2606.04101; github.com/Dots-Infra/UltraEP v1.0.0, 94cab09): greedy copies below a ceiling.

Sees the exact loads of one (micro-batch, layer), after gating. Homes never move. Ranks above a ceiling `tau` hand their
excess to ranks of the same node that have a free slot. Three ceilings are tried first, from 1 % above the mean: a copy
takes at least its source's remaining excess / number of targets. Else a search finds a low ceiling with copies of at
least `u_min` token-slots. Equal to the released kernel up to the rounding of its single-precision ceilings.

UltraEP ships `u_min` 1,024 (ULTRA_EP_QUOTA_MIN_TOKENS_PER_REPLICA) and 2 slots. Where a rank gets a few thousand
token-slots or fewer that limit refuses nearly every copy of the search, so `ultraep` plans with 1, which is best for it
at any size; `ultraep_shipped` keeps 1,024.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.placement import Placement
from relibra.routing.compiled import compiled

KEEP = 1
"""Fewest token-slots of an expert that stay at its home."""

SHIPPED_U_MIN = 1024
"""Fewest token-slots of a copy in the search, as UltraEP ships it."""

PROBES = 4
"""Ceilings that the search tries at once: one per warp."""


def decide(request: PlacementRequest) -> Placement:
    """Solve each (micro-batch, layer, node) by itself, homes as they are, with copies of any size."""
    return _decide(request, u_min=1)


def decide_as_shipped(request: PlacementRequest) -> Placement:
    """Solve as `decide` does, but where the first three ceilings fail, with copies of at least 1,024 token-slots."""
    return _decide(request, u_min=SHIPPED_U_MIN)


def _decide(request: PlacementRequest, u_min: int) -> Placement:
    G = request.cluster.ranks_per_node
    load_MLE, home_LE = request.demand.load_MLE, request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()
    if request.slots:
        for layer in range(home_LE.shape[0]):
            home_E = home_LE[layer].astype(np.int64)
            for node in range(request.cluster.num_nodes):
                here = slice(node * G, (node + 1) * G)
                experts = np.flatnonzero(home_E // G == node)
                load_MX = np.ascontiguousarray(load_MLE[:, layer, experts])
                replica_MGB, quota_MGB = solve(load_MX, home_E[experts] - node * G, G, request.slots, u_min=u_min)
                replica_MLRB[:, layer, here] = np.where(replica_MGB >= 0, experts[replica_MGB], -1)
                quota_MLRB[:, layer, here] = quota_MGB
    return request.placement(home_LE, replica_MLRB, quota_MLRB)


def solve(
    load_ME: Int[ndarray, "M E"], home_E: Int[ndarray, " E"], num_ranks: int, slots: int, *, u_min: int = 1
) -> tuple[Int16[ndarray, "M R B"], Int32[ndarray, "M R B"]]:
    """Plan the replicas of one domain (the ranks of one node) for each micro-batch.

    home_E    home rank of each expert, 0..num_ranks-1
    u_min     fewest token-slots of a copy in the search
    returns   expert per slot (-1: empty) and the token-slots it computes
    """
    replica_MRB = np.full((len(load_ME), num_ranks, slots), -1, dtype=np.int16)
    quota_MRB = np.zeros((len(load_ME), num_ranks, slots), dtype=np.int32)
    _solve_all(load_ME.astype(np.int64), home_E.astype(np.int64), u_min, replica_MRB, quota_MRB)
    return replica_MRB, quota_MRB


@compiled
@no_type_check
def sort_sources(load_E, home_E, load_R) -> tuple[ndarray, ndarray, ndarray]:
    """Return experts by home and falling load, each home's first place, and ranks by falling load; ties: lower id."""
    E, R = len(load_E), len(load_R)
    starts, order_E, source_R = np.zeros(R + 1, np.int64), np.empty(E, np.int64), np.empty(R, np.int64)
    for e in range(E):
        starts[home_E[e] + 1] += 1
    for r in range(R):
        starts[r + 1] += starts[r]
    filled_R = starts[:R].copy()
    for e in range(E):  # insertion sort: a rank is home of few experts
        first, x = starts[home_E[e]], filled_R[home_E[e]]
        while x > first and load_E[order_E[x - 1]] < load_E[e]:
            order_E[x] = order_E[x - 1]
            x -= 1
        order_E[x] = e
        filled_R[home_E[e]] += 1
    for r in range(R):
        x = r
        while x > 0 and load_R[source_R[x - 1]] < load_R[r]:
            source_R[x] = source_R[x - 1]
            x -= 1
        source_R[x] = r
    return order_E, starts, source_R


@compiled
@no_type_check
def shed_excess(load_E, load_R, order_E, starts, source_R, tau, floor, room_R, free_R, replica_RB, quota_RB) -> bool:
    """Bring every rank to at most `tau` token-slots, greedily; return whether that succeeded.

    It may fail at a ceiling and succeed at a lower one. Copies are written to `replica_RB` and `quota_RB`.

    floor   fewest token-slots of a copy; 0: its source's remaining excess / number of targets, rounded up
    """
    R, B = replica_RB.shape
    excess, slack = 0, 0
    for r in range(R):
        room_R[r], free_R[r] = max(tau - load_R[r], 0), B
        excess += max(load_R[r] - tau, 0)
        slack += room_R[r]
        for b in range(B):
            replica_RB[r, b], quota_RB[r, b] = -1, 0
    if excess > slack:
        return False
    for s in source_R:
        need = load_R[s] - tau
        if need <= 0:
            return True
        for x in range(starts[s], starts[s + 1]):
            e = order_E[x]
            available = load_E[e] - KEEP
            while need > 0 and available > 0:
                t, candidates = _roomiest(e, room_R, free_R, replica_RB)
                if t < 0:
                    break
                amount = min(need, room_R[t], available)
                if amount < (floor if floor > 0 else -(-need // candidates)):
                    break
                b = B - free_R[t]
                replica_RB[t, b], quota_RB[t, b] = e, amount
                room_R[t] -= amount
                free_R[t] -= 1
                need -= amount
                available -= amount
            if need == 0:
                break
        if need > 0:
            return False
    return True


@compiled
@no_type_check
def _roomiest(e, room_R, free_R, replica_RB) -> tuple[int, int]:
    """Return the target with most room for a new copy of `e` (-1: none; ties: lower id), and the number of targets."""
    best, candidates = -1, 0
    B = replica_RB.shape[1]
    for t in range(len(room_R)):
        if room_R[t] > 0 and free_R[t] > 0:
            held = False
            for b in range(B - free_R[t]):
                held = held or replica_RB[t, b] == e
            if not held:
                candidates += 1
                if best < 0 or room_R[t] > room_R[best]:
                    best = t
    return best, candidates


@compiled
@no_type_check
def _solve_all(load_ME, home_E, u_min, replica_MRB, quota_MRB) -> None:
    M, R, B = replica_MRB.shape
    load_R, room_R, free_R = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
    replica_RB, quota_RB = np.empty((R, B), np.int16), np.empty((R, B), np.int32)
    for m in range(M):
        load_E = load_ME[m]
        load_R[:] = 0
        for e in range(len(load_E)):
            load_R[home_E[e]] += load_E[e]
        mean = -(-load_R.sum() // R)
        top = max(load_R.max(), mean)
        order_E, starts, source_R = sort_sources(load_E, home_E, load_R)
        tau, found = -(-mean * 101 // 100), False
        for _ in range(3):
            found = shed_excess(load_E, load_R, order_E, starts, source_R, tau, 0, room_R, free_R, replica_RB, quota_RB)
            if found:
                break
            tau = min(top, tau + max(1, -(-top // 100)))
        if not found:
            tau = _search(
                load_E, load_R, order_E, starts, source_R, mean, top, u_min, room_R, free_R, replica_RB, quota_RB
            )
            shed_excess(load_E, load_R, order_E, starts, source_R, tau, u_min, room_R, free_R, replica_RB, quota_RB)
        replica_MRB[m], quota_MRB[m] = replica_RB, quota_RB


@compiled
@no_type_check
def _search(load_E, load_R, order_E, starts, source_R, low, high, u_min, room_R, free_R, replica_RB, quota_RB) -> int:
    """Return the ceiling that UltraEP's search ends at: `low` first, then PROBES at a time from `low` to `high`.

    At `high`, the load of the fullest rank, nothing is shed. Success is not monotone, so it matters which are tried.
    """
    if shed_excess(load_E, load_R, order_E, starts, source_R, low, u_min, room_R, free_R, replica_RB, quota_RB):
        return low
    low = min(low + 1, high)
    while low < high:
        first, span = low, high - low
        near = span <= PROBES
        for w in range(min(span, PROBES)):
            probe = first + w if near else first + span * (w + 1) // (PROBES + 1)
            if shed_excess(
                load_E, load_R, order_E, starts, source_R, probe, u_min, room_R, free_R, replica_RB, quota_RB
            ):
                high = probe
                break
            low = probe + 1
        if near:
            return high
    return low
