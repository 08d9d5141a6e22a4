"""LLEP, least-loaded expert parallelism (arXiv 2601.17111; github.com/SalesforceAIResearch/LeastLoadedEP, 0349746).

Sees the exact loads of one (micro-batch, layer), before every layer. Experts, heaviest first, keep on their home what
fits under a capacity and spill the rest, with their weights, to the least loaded ranks. The original has no limit on
how many foreign experts a rank takes; here the spare slots are the limit, and what finds no slot stays at home.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from relibra.planning.balancer import PlacementRequest
from relibra.planning.placement import Placement
from relibra.routing.compiled import compiled

CAPACITY = 1.1
"""Load that a rank may reach, as a multiple of the mean."""

SMALL = 1024
"""Token-slots below which no weights are sent for a piece, unless it is the last of its expert."""

LOWEST_SKEW = 1.3
"""Skew below which experts stay at home."""


def decide(request: PlacementRequest) -> Placement:
    """Spill what is over capacity to the least loaded ranks of the cluster, per (micro-batch, layer)."""
    home_LE = request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()
    if request.slots:
        _spill_all(request.demand.load_MLE, home_LE.astype(np.int64), replica_MLRB, quota_MLRB)
    return request.placement(home_LE, replica_MLRB, quota_MLRB, scope="cluster")


@compiled
@no_type_check
def _spill_all(load_MLE, home_LE, replica_MLRB, quota_MLRB) -> None:
    M, L, R, _ = replica_MLRB.shape
    pending_R = np.empty(R, np.int64)
    for m in range(M):
        for layer in range(L):
            load_E = load_MLE[m, layer]
            pending_R[:] = 0
            for e in range(len(load_E)):
                pending_R[home_LE[layer, e]] += load_E[e]
            if pending_R.max() * R >= LOWEST_SKEW * load_E.sum() and load_E.sum() > 0:
                _spill(load_E, home_LE[layer], pending_R, replica_MLRB[m, layer], quota_MLRB[m, layer])


@compiled
@no_type_check
def _spill(load_E, home_E, pending_R, replica_RB, quota_RB) -> None:
    """Serve experts by falling load; `pending_R` is the load of experts that still wait, by home rank."""
    R, B = replica_RB.shape
    capacity = int(CAPACITY * (load_E.sum() // R))
    assigned_R = np.zeros(R, np.int64)
    for e in np.argsort(-load_E, kind="mergesort"):
        home = home_E[e]
        pending_R[home] -= load_E[e]
        own = max(0, min(load_E[e], capacity - assigned_R[home] - pending_R[home]))
        assigned_R[home] += own
        rest = load_E[e] - own
        for r in np.argsort(assigned_R + pending_R, kind="mergesort"):
            if rest == 0:
                break
            piece = min(rest, capacity - assigned_R[r] - pending_R[r])
            if r == home or replica_RB[r, B - 1] >= 0 or piece <= 0 or (piece < SMALL and piece < rest):
                continue
            _put(e, r, piece, replica_RB, quota_RB)
            assigned_R[r] += piece
            rest -= piece
        if rest == load_E[e] - own and rest > 0:  # no rank took a piece: all of it to the least loaded with a slot
            least = home
            for r in range(R):
                free = r == home or replica_RB[r, B - 1] < 0
                if free and assigned_R[r] + pending_R[r] < assigned_R[least] + pending_R[least]:
                    least = r
            if least != home:
                _put(e, least, rest, replica_RB, quota_RB)
                assigned_R[least] += rest
                rest = 0
        assigned_R[home] += rest


@compiled
@no_type_check
def _put(e, r, tokens, replica_RB, quota_RB) -> None:
    for b in range(replica_RB.shape[1]):
        if replica_RB[r, b] < 0:
            replica_RB[r, b], quota_RB[r, b] = e, tokens
            return
