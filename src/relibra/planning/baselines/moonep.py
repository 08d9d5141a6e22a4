"""MoonEP's planner (github.com/MoonshotAI/MoonEP; read in its forks, for example feliang-git/MoonEP 931911d).

Sees the exact loads of one (micro-batch, layer), after gating. Homes never move. Capacity: the domain's mean load per
rank, rounded up. While a rank is above it, the fullest rank fills the emptiest up to capacity, so a rank receives from
at most one other; a giver that falls below capacity is filled in turn. A giver cuts its expert with most token-slots
left, for the receiver that lacks most. There is no tolerance.

MoonEP reserves E / R slots per rank, as many as a rank has experts at home: no receiver can need more. The plan here
has as many, whatever the budget gives, unless it gives 0: no replicas. `replica_MLRB` says how many are used.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.placement import Placement, Scope
from relibra.routing.compiled import compiled


def decide(request: PlacementRequest) -> Placement:
    """Return the placement in which all ranks are one domain, as where NVLink connects the whole group."""
    return _decide(request, request.cluster.num_ranks)


def decide_in_nodes(request: PlacementRequest) -> Placement:
    """Return the placement in which each node is a domain of its own: experts never leave their node."""
    return _decide(request, request.cluster.ranks_per_node)


def _decide(request: PlacementRequest, domain_ranks: int) -> Placement:
    load_MLE, home_LE = request.demand.load_MLE, request.previous.home_LE.copy()
    scope: Scope = "node" if domain_ranks <= request.cluster.ranks_per_node else "cluster"
    if not request.slots:
        return request.placement(home_LE, *request.empty_slots(), scope=scope)
    (M, L, E), R = load_MLE.shape, request.cluster.num_ranks
    replica_MLRB = np.full((M, L, R, E // R), -1, dtype=np.int16)
    quota_MLRB = np.zeros((M, L, R, E // R), dtype=np.int32)
    for layer in range(L):
        home_E = home_LE[layer].astype(np.int64)
        for first in range(0, R, domain_ranks):
            here = slice(first, first + domain_ranks)
            experts = np.flatnonzero(home_E // domain_ranks == first // domain_ranks)
            load_MX = np.ascontiguousarray(load_MLE[:, layer, experts])
            replica_MRB, quota_MRB = solve(load_MX, home_E[experts] - first, domain_ranks)
            replica_MLRB[:, layer, here] = np.where(replica_MRB >= 0, experts[replica_MRB], -1)
            quota_MLRB[:, layer, here] = quota_MRB
    return request.placement(home_LE, replica_MLRB, quota_MLRB, scope=scope)


def solve(
    load_ME: Int[ndarray, "M E"], home_E: Int[ndarray, " E"], num_ranks: int
) -> tuple[Int16[ndarray, "M R B"], Int32[ndarray, "M R B"]]:
    """Plan the replicas of one domain for each micro-batch.

    home_E    home rank of each expert, 0..num_ranks-1, the same number on each
    returns   expert per slot (-1: empty) and the token-slots it computes; B is the number of homes of a rank
    """
    shape = (len(load_ME), num_ranks, len(home_E) // num_ranks)
    replica_MRB, quota_MRB = np.full(shape, -1, dtype=np.int16), np.zeros(shape, dtype=np.int32)
    order_E = np.argsort(home_E, kind="stable")  # by home, then by id
    homes_RB = order_E.reshape(num_ranks, shape[2])
    _solve_all(load_ME.astype(np.int64), homes_RB, replica_MRB, quota_MRB)
    return replica_MRB, quota_MRB


@compiled
@no_type_check
def _solve_all(load_ME, homes_RB, replica_MRB, quota_MRB) -> None:
    R, B = homes_RB.shape
    load_R, giver_R, quota_R = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
    left_B = np.empty(B, np.int64)
    for m in range(len(load_ME)):
        load_R[:] = 0
        for r in range(R):
            for b in range(B):
                load_R[r] += load_ME[m, homes_RB[r, b]]
        _pair_ranks(load_R, giver_R, quota_R)
        for giver in range(R):
            for b in range(B):
                left_B[b] = load_ME[m, homes_RB[giver, b]]
            _cut_experts(giver, homes_RB[giver], left_B, giver_R, quota_R, replica_MRB[m], quota_MRB[m])


@compiled
@no_type_check
def _pair_ranks(load_R, giver_R, quota_R) -> None:
    """Fill `giver_R` and `quota_R` with who fills each rank (-1: nobody) and by how much; ties: the lower rank.

    `load_R` ends at most at the capacity.
    """
    giver_R[:], quota_R[:] = -1, 0
    capacity = -(-load_R.sum() // len(load_R))
    while True:
        giver, receiver = np.argmax(load_R), np.argmin(load_R)
        if load_R[giver] <= capacity:
            return
        amount = capacity - load_R[receiver]
        giver_R[receiver], quota_R[receiver] = giver, amount
        load_R[giver] -= amount
        load_R[receiver] = capacity


@compiled
@no_type_check
def _cut_experts(giver, home_B, left_B, giver_R, quota_R, replica_RB, quota_RB) -> None:
    """Serve a giver's quotas: its expert with most left to the receiver that lacks most (ties: lower id, rank)."""
    while True:
        receiver = -1
        for r in range(len(quota_R)):
            if giver_R[r] == giver and quota_R[r] > 0 and (receiver < 0 or quota_R[r] > quota_R[receiver]):
                receiver = r
        if receiver < 0:
            return
        largest = np.argmax(left_B)
        amount = min(left_B[largest], quota_R[receiver])
        slot = 0
        while replica_RB[receiver, slot] >= 0:
            slot += 1
        replica_RB[receiver, slot], quota_RB[receiver, slot] = home_B[largest], amount
        left_B[largest] -= amount
        quota_R[receiver] -= amount
