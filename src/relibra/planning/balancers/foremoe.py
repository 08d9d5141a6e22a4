"""After ForeMoE (arXiv 2606.11867; no public code): machines for the step, homes inside them, spills per micro-batch.

Uses the loads of every (micro-batch, layer). Level 1 assigns experts to machines so that the fullest machine's load,
summed over micro-batches, is low, and keeps the old map unless the gain exceeds the cost of moves; level 1b assigns
them to ranks of a machine; level 2 sends a few experts of an overfull machine to another one's ranks; level 3 splits
experts inside a machine. The paper leaves levels 1 and 3 open; its micro-step heuristic moves whole experts, ignores
the receiver's load and can increase the maximum, so splitting is used instead.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.balancer import PlacementRequest
from relibra.planning.levers.homes import SwapPrices, renumber_bins, swap_nodes
from relibra.planning.levers.replication import slot_of
from relibra.planning.placement import Placement
from relibra.planning.relibra_paper.nodes_and_ranks import busiest, ranks_inside_nodes
from relibra.routing.compiled import compiled

OVERFULL = 1.03
"""Load of the fullest machine / mean above which experts leave it."""

LEAVING = 2
"""Experts that may leave a machine in one (micro-batch, layer)."""


def decide(request: PlacementRequest) -> Placement:
    """Choose homes for the step, then spill per (micro-batch, layer)."""
    budget, cluster = request.budget, request.cluster
    load_MLE, before_LE = request.demand.load_MLE, request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()

    def plan(layer: int) -> ndarray:
        load_ME = np.ascontiguousarray(load_MLE[:, layer])
        home_E = before_LE[layer].astype(np.int64)
        if budget.move_homes:
            home_E = _search_homes(request, load_ME, home_E)
        if request.slots:
            slots = replica_MLRB[:, layer], quota_MLRB[:, layer]
            _spill_layer(load_ME, home_E, cluster.ranks_per_node, budget.tolerance, *slots)
        return home_E

    home_LE = np.array(parallel_map(plan, before_LE.shape[0]), dtype=np.int16)
    return request.placement(home_LE, replica_MLRB, quota_MLRB, scope="cluster")


def _search_homes(request: PlacementRequest, load_ME: ndarray, before_E: Int64[ndarray, " E"]) -> Int64[ndarray, " E"]:
    """Return the homes of levels 1 and 1b if their gain exceeds the cost of moves, else the old ones."""
    cluster = request.cluster
    G, N, E = cluster.ranks_per_node, cluster.num_nodes, load_ME.shape[1]
    machine_E = before_E // G
    if N > 1:
        dealt_E = renumber_bins(deal_machines(load_ME, N), machine_E, N)
        found_E = min((machine_E, dealt_E), key=lambda map_E: busiest(load_ME, map_E))
        nowhere_MNE = np.zeros((len(load_ME), N, E), dtype=np.int64)
        found_E = swap_nodes(load_ME, nowhere_MNE, found_E, SwapPrices())
        if busiest(load_ME, found_E) < busiest(load_ME, machine_E):
            machine_E = found_E
    total_1E = load_ME.sum(axis=0, keepdims=True)  # level 1b of the paper: longest first by step totals, no annealing
    home_E = ranks_inside_nodes(total_1E, machine_E, before_E, G, N, move=0.0, proposals=0, seed=0)
    same_machine_E = machine_E == before_E // G
    gain = (busiest(load_ME, before_E // G) - busiest(load_ME, machine_E)) / G
    if same_machine_E.all():
        gain = busiest(load_ME, before_E) - busiest(load_ME, home_E)
    return home_E if gain > _moving_token_slots(request, int((home_E != before_E).sum())) else before_E


def _moving_token_slots(request: PlacementRequest, moved: int) -> float:
    """Return the token-slots that a rank trains in the seconds of moves / steps served; all ranks send equally much."""
    cluster, expert = request.cluster, request.expert
    sent_per_rank = moved * expert.state_bytes / cluster.num_ranks / request.budget.steps_served
    seconds = sent_per_rank / cluster.slowest_bytes_per_second
    return seconds * cluster.flops_per_second / (3 * expert.flops_per_token_slot)


@compiled
@no_type_check
def deal_machines(load_ME, num_machines) -> ndarray:
    """Assign experts, heaviest first, to the machine with room that raises the sum of maxima least; ties: less load."""
    M, E = load_ME.shape
    load_MN, top_M = np.zeros((M, num_machines), np.int64), np.zeros(M, np.int64)
    room_N = np.full(num_machines, E // num_machines)
    machine_E = np.empty(E, np.int64)
    for e in np.argsort(-load_ME.sum(axis=0), kind="mergesort"):
        best, best_rise, best_load = -1, 0, 0
        for n in range(num_machines):
            if room_N[n] == 0:
                continue
            rise, load = 0, 0
            for m in range(M):
                rise += max(0, load_MN[m, n] + load_ME[m, e] - top_M[m])
                load += load_MN[m, n]
            if best < 0 or rise < best_rise or (rise == best_rise and load < best_load):
                best, best_rise, best_load = n, rise, load
        machine_E[e] = best
        room_N[best] -= 1
        for m in range(M):
            load_MN[m, best] += load_ME[m, e]
            top_M[m] = max(top_M[m], load_MN[m, best])
    return machine_E


@compiled
@no_type_check
def _spill_layer(load_ME, home_E, ranks_per_node, tolerance, replica_MRB, quota_MRB) -> None:
    M, E = load_ME.shape
    R = replica_MRB.shape[1]
    load_R, left_E = np.empty(R, np.int64), np.empty(E, np.int64)
    for m in range(M):
        at_home_R = np.zeros(R, np.int64)
        for e in range(E):
            at_home_R[home_E[e]] += load_ME[m, e]
        least = at_home_R.max()
        for leave in range(2 if ranks_per_node < R else 1):  # level 2 takes slots of level 3: kept where it helps
            replica_RB, quota_RB = np.full_like(replica_MRB[m], -1), np.zeros_like(quota_MRB[m])
            load_R[:] = at_home_R
            left_E[:] = load_ME[m]
            if leave:
                _leave_machines(home_E, ranks_per_node, load_R, left_E, replica_RB, quota_RB)
            for low in range(0, R, ranks_per_node):
                _spill(home_E, low, low + ranks_per_node, tolerance, load_R, left_E, replica_RB, quota_RB)
            if load_R.max() < least:
                least = load_R.max()
                replica_MRB[m], quota_MRB[m] = replica_RB, quota_RB


@compiled
@no_type_check
def _leave_machines(home_E, ranks_per_node, load_R, left_E, replica_RB, quota_RB) -> None:
    """Level 2: split experts of the fullest machine with the least loaded rank of the emptiest one."""
    R, B = replica_RB.shape
    N = R // ranks_per_node
    load_N, leaving_N = np.zeros(N, np.int64), np.zeros(N, np.int64)
    for r in range(R):
        load_N[r // ranks_per_node] += load_R[r]
    mean = -(-load_N.sum() // N)
    while True:
        source, target = np.argmax(load_N), np.argmin(load_N)
        if load_N[source] <= OVERFULL * mean or leaving_N[source] == LEAVING or load_N[target] >= mean:
            return
        e = -1
        for x in range(len(home_E)):
            if home_E[x] // ranks_per_node == source and (e < 0 or left_E[x] > left_E[e]):
                e = x
        t = -1
        for r in range(target * ranks_per_node, (target + 1) * ranks_per_node):
            if slot_of(e, replica_RB[r]) < 0 and replica_RB[r, B - 1] < 0 and (t < 0 or load_R[r] < load_R[t]):
                t = r
        tokens = min(load_N[source] - mean, mean - load_N[target], left_E[e])
        if t < 0 or tokens == 0:
            return
        _move(e, home_E[e], t, tokens, load_R, left_E, replica_RB, quota_RB)
        load_N[source] -= tokens
        load_N[target] += tokens
        leaving_N[source] += 1


@compiled
@no_type_check
def _spill(home_E, low, high, tolerance, load_R, left_E, replica_RB, quota_RB) -> None:
    """Level 3: split the largest experts of the fullest rank with the least loaded ranks of ranks low..high."""
    B = replica_RB.shape[1]
    mean = -(-load_R[low:high].sum() // (high - low))
    ceiling = int(mean * (1 + tolerance))
    blocked_R, tried_E = np.zeros(len(load_R), np.bool_), np.zeros(len(home_E), np.bool_)
    while True:
        source = -1
        for r in range(low, high):
            if not blocked_R[r] and load_R[r] > ceiling and (source < 0 or load_R[r] > load_R[source]):
                source = r
        if source < 0:
            return
        tried_E[:] = False
        while True:
            e, target, holds = -1, -1, False
            for x in range(len(home_E)):
                if home_E[x] == source and not tried_E[x] and left_E[x] > 0 and (e < 0 or left_E[x] > left_E[e]):
                    e = x
            if e < 0:
                blocked_R[source] = True
                break
            for r in range(low, high):
                if load_R[r] >= mean or r == source:
                    continue
                here = slot_of(e, replica_RB[r]) >= 0
                if not here and (holds or replica_RB[r, B - 1] >= 0):
                    continue
                if target < 0 or (here and not holds) or load_R[r] < load_R[target]:
                    target, holds = r, here
            if target >= 0:
                tokens = min(load_R[source] - mean, mean - load_R[target], left_E[e])
                _move(e, source, target, tokens, load_R, left_E, replica_RB, quota_RB)
                break
            tried_E[e] = True


@compiled
@no_type_check
def _move(e, source, target, tokens, load_R, left_E, replica_RB, quota_RB) -> None:
    """Move token-slots of `e` from its home to `target`, into a new slot if `target` has no copy."""
    b = slot_of(e, replica_RB[target])
    if b < 0:
        b = slot_of(-1, replica_RB[target])
        replica_RB[target, b] = e
    quota_RB[target, b] += tokens
    load_R[source] -= tokens
    load_R[target] += tokens
    left_E[e] -= tokens
