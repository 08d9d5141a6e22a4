"""After FEPLB (arXiv 2604.19654; no public code): whole dynamic experts move inside a node, weights and tokens.

Sees the exact loads of one (micro-batch, layer). While the fullest rank of a node has an expert that fits on the
lightest rank, all of this expert is computed there, while other experts compute; homes never move. Here any expert may
be one of the few *dynamic* ones of its rank (the paper leaves open which), there is no lower limit on its tokens
(unpublished), the spare slots are the copy budget of a receiver, and the receiver must stay below the giver's old
load, as moves of whole experts could make things worse.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from relibra.planning.balancer import PlacementRequest
from relibra.planning.placement import Placement
from relibra.routing.compiled import compiled

DYNAMIC = 4
"""Experts that may leave a rank; the paper's default."""


def decide(request: PlacementRequest) -> Placement:
    """Move busy experts, whole, to lighter ranks of their node, per (micro-batch, layer)."""
    home_LE = request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()
    if request.slots:
        _move_all(
            request.demand.load_MLE, home_LE.astype(np.int64), request.cluster.ranks_per_node, replica_MLRB, quota_MLRB
        )
    return request.placement(home_LE, replica_MLRB, quota_MLRB)


@compiled
@no_type_check
def _move_all(load_MLE, home_LE, ranks_per_node, replica_MLRB, quota_MLRB) -> None:
    M, L, E = load_MLE.shape
    R = replica_MLRB.shape[2]
    load_R, home_E, left_R = np.empty(R, np.int64), np.empty(E, np.int64), np.empty(R, np.int64)
    for m in range(M):
        for layer in range(L):
            load_R[:], left_R[:] = 0, 0
            home_E[:] = home_LE[layer]
            for e in range(E):
                load_R[home_E[e]] += load_MLE[m, layer, e]
            for low in range(0, R, ranks_per_node):
                _move(
                    load_MLE[m, layer], load_R, home_E, left_R, low, low + ranks_per_node,
                    replica_MLRB[m, layer], quota_MLRB[m, layer],
                )  # fmt: skip


@compiled
@no_type_check
def _move(load_E, load_R, home_E, left_R, low, high, replica_RB, quota_RB) -> None:
    """Move experts between ranks low..high; one that has moved has no home in `home_E` and does not travel on."""
    B = replica_RB.shape[1]
    while True:
        source, target = low, -1
        for r in range(low, high):
            if load_R[r] > load_R[source]:
                source = r
            if replica_RB[r, B - 1] < 0 and (target < 0 or load_R[r] < load_R[target]):
                target = r
        if target < 0 or left_R[source] == DYNAMIC:
            return
        best, gap = -1, load_R[source] - load_R[target]
        for e in range(len(load_E)):
            if home_E[e] == source and 0 < load_E[e] < gap and (best < 0 or load_E[e] > load_E[best]):
                best = e
        if best < 0:
            return
        b = 0
        while replica_RB[target, b] >= 0:
            b += 1
        replica_RB[target, b], quota_RB[target, b] = best, load_E[best]
        home_E[best] = -1
        left_R[source] += 1
        load_R[source] -= load_E[best]
        load_R[target] += load_E[best]
