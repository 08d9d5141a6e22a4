"""Puts of a transport that sends the rows of each expert by themselves (Perseus, arXiv 2605.00686)."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.traffic.split import split_expert
from relibra.routing.compiled import compiled


def expert_puts(
    tokens_LRE: Int[ndarray, "L R E"],
    home_LE: Int[ndarray, "L E"],
    replica_LRB: Int[ndarray, "L R B"],
    quota_LRB: Int[ndarray, "L R B"],
    ranks_per_node: int,
) -> Int64[ndarray, "L R R2"]:
    """Return how many experts of each rank (last axis) get token-slots from each source rank, homes and replicas.

    Full micro-batches without replicas put to E / R experts of every rank: (R - G) E / R between nodes.
    """
    L, R, _ = tokens_LRE.shape
    puts_LRR = np.zeros((L, R, R), dtype=np.int64)
    _count_puts(tokens_LRE, home_LE.astype(np.int64), replica_LRB, quota_LRB, ranks_per_node, puts_LRR)
    return puts_LRR


@compiled
@no_type_check
def _count_puts(tokens_LRE, home_LE, replica_LRB, quota_LRB, ranks_per_node, puts_LRR) -> None:
    L, R, E = tokens_LRE.shape
    B = replica_LRB.shape[2]
    rank_I, left_I, column_I = np.empty(R * B + 1, np.int64), np.empty(R * B + 1, np.int64), np.arange(R * B + 1)
    remainder_I, open_X = np.empty(R * B + 1, np.int64), np.empty(R * B + 1, np.int64)
    supply_R = np.empty(R, np.int64)
    for layer in range(L):
        for e in range(E):
            rank_I[0], left_I[0], n = home_LE[layer, e], 0, 1
            for s in range(R):
                supply_R[s] = tokens_LRE[layer, s, e]
                left_I[0] += supply_R[s]
            for x in range(R * B):
                if replica_LRB[layer, x // B, x % B] == e:
                    rank_I[n], left_I[n] = x // B, quota_LRB[layer, x // B, x % B]
                    left_I[0] -= left_I[n]
                    n += 1
            split_RI = np.zeros((R, n), np.int64)
            split_expert(supply_R, rank_I[:n], left_I[:n], ranks_per_node, remainder_I, open_X, column_I, split_RI)
            for s in range(R):
                for i in range(n):
                    puts_LRR[layer, s, rank_I[i]] += split_RI[s, i] > 0
