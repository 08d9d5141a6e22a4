"""Puts of a transport that sends the rows of each expert by themselves (Perseus, arXiv 2605.00686)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.traffic.split import split_tokens


def expert_puts(
    tokens_LRE: Int[ndarray, "L R E"],
    home_LE: Int[ndarray, "L E"],
    replica_LRB: Int[ndarray, "L R B"],
    quota_LRB: Int[ndarray, "L R B"],
    ranks_per_node: int,
) -> Int64[ndarray, "L R R2"]:
    """Return how many experts of each rank (last axis) get token-slots from each source rank, homes and replicas.

    If all ranks route to all experts, without replicas, a rank makes (R - G) E / R puts to other nodes.
    """
    L, R, _ = tokens_LRE.shape
    puts_LRR = np.zeros((L, R, R), dtype=np.int64)
    for at in range(L):
        split = split_tokens(tokens_LRE[at], home_LE[at], replica_LRB[at], quota_LRB[at], ranks_per_node)
        np.add.at(puts_LRR[at].T, split.rank_I, split.tokens_RI.T > 0)
    return puts_LRR
