"""Replicas by incremental greedy, slow and obvious: ReLibra's heuristic as we read it (arXiv 2605.08639).

A cross-check and an ablation for `relibra.planning.levers.replication`: same rules, one move at a time, plain Python.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray


def replicate_incrementally(
    load_E: Int64[ndarray, " E"], home_E: Int[ndarray, " E"], num_ranks: int, *, slots: int
) -> tuple[Int16[ndarray, "R B"], Int32[ndarray, "R B"]]:
    """Move tokens from the fullest rank, the largest useful piece first, until none helps; all ranks in one node.

    returns   expert per slot (-1: empty) and its token-slots
    """
    replica_RB = np.full((num_ranks, slots), -1, dtype=np.int16)
    quota_RB = np.zeros((num_ranks, slots), dtype=np.int32)
    load_R = np.bincount(home_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    left_E = load_E.copy()
    mean = -(-int(load_E.sum()) // num_ranks)
    while True:
        source = int(np.argmax(load_R))
        moves = []
        for expert in np.flatnonzero((home_E == source) & (left_E > 0)).tolist():
            for target in range(num_ranks):
                held = bool((replica_RB[target] == expert).any())
                if target == source or not (held or (replica_RB[target] < 0).any()):
                    continue
                tokens = min(int(left_E[expert]), int(load_R[source]) - mean, mean - int(load_R[target]))
                if tokens > 0:
                    moves.append((-tokens, not held, target, expert))
        if not moves:
            return replica_RB, quota_RB
        less, new, target, e = min(moves)
        moved, slot = -less, int(np.argmax(replica_RB[target] == (-1 if new else e)))
        replica_RB[target, slot] = e
        quota_RB[target, slot] += moved
        load_R[source] -= moved
        load_R[target] += moved
        left_E[e] -= moved
