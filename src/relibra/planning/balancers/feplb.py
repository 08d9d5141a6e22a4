"""After FEPLB (arXiv 2604.19654; no public code): whole dynamic experts move inside a node, weights and tokens.

Sees the exact loads of one (micro-batch, layer). The busiest experts of a rank are *dynamic*: while the fullest rank
has one that fits on the lightest rank, it is computed there, all of it; homes never move. Ours: which experts are
dynamic (unpublished), no lower limit on their tokens (unpublished), the spare slots as the copy budget of a rank, and
the check that the receiver stays below the giver, without which whole-expert moves can make things worse.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from relibra.planning.balancers.homes import empty_slots, previous_homes
from relibra.planning.decision import Decision, Question
from relibra.routing.compiled import compiled

DYNAMIC = 4
"""Experts of a rank that may move; the paper's default."""


def decide(question: Question) -> Decision:
    """Move busy experts whole to lighter ranks of their node, per (micro-batch, layer)."""
    home_LE = previous_homes(question)
    replica_MLRB, quota_MLRB = empty_slots(question)
    if question.budget.slots:
        _move_all(
            question.demand.load_MLE,
            home_LE.astype(np.int64),
            question.cluster.ranks_per_node,
            replica_MLRB,
            quota_MLRB,
        )
    return Decision(home_LE=home_LE, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB)


@compiled
@no_type_check
def _move_all(load_MLE, home_LE, ranks_per_node, replica_MLRB, quota_MLRB) -> None:
    M, L, E = load_MLE.shape
    R = replica_MLRB.shape[2]
    load_R, count_R, dynamic_RD = np.empty(R, np.int64), np.empty(R, np.int64), np.empty((R, DYNAMIC), np.int64)
    for m in range(M):
        for layer in range(L):
            load_R[:], count_R[:] = 0, 0
            order = np.argsort(-load_MLE[m, layer], kind="mergesort")
            for x in range(E):
                home = home_LE[layer, order[x]]
                load_R[home] += load_MLE[m, layer, order[x]]
                if count_R[home] < DYNAMIC:
                    dynamic_RD[home, count_R[home]] = order[x]
                    count_R[home] += 1
            for low in range(0, R, ranks_per_node):
                _move(
                    load_MLE[m, layer], load_R, dynamic_RD, count_R, low, low + ranks_per_node,
                    replica_MLRB[m, layer], quota_MLRB[m, layer],
                )  # fmt: skip


@compiled
@no_type_check
def _move(load_E, load_R, dynamic_RD, count_R, low, high, replica_RB, quota_RB) -> None:
    """Move dynamic experts between ranks low..high; one that has moved is struck off `dynamic_RD`."""
    B = replica_RB.shape[1]
    while True:
        source, target = low, -1
        for r in range(low, high):
            if load_R[r] > load_R[source]:
                source = r
            if replica_RB[r, B - 1] < 0 and (target < 0 or load_R[r] < load_R[target]):
                target = r
        if target < 0:
            return
        best = -1
        for d in range(count_R[source]):  # busiest first
            e = dynamic_RD[source, d]
            if e >= 0 and load_E[e] > 0 and load_R[target] + load_E[e] < load_R[source]:
                best = e
                dynamic_RD[source, d] = -1
                break
        if best < 0:
            return
        b = 0
        while replica_RB[target, b] >= 0:
            b += 1
        replica_RB[target, b], quota_RB[target, b] = best, load_E[best]
        load_R[source] -= load_E[best]
        load_R[target] += load_E[best]
