"""`DistinctRows`: tokens that each rank sends to each rank and to each node, counted token by token.

A token with several choices on a rank travels there once, and with hierarchical dispatch once to their node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.placement import Placement
from relibra.planning.traffic.split import TokenSplit, split_tokens
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

MAX_PAIRS = 1 << 26
"""Most entries of the tables of distinct rows; for larger steps callers use bounds instead of exact counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctRows:
    """Distinct tokens by source rank, in every micro-batch and layer; what stays on a rank or in a node is counted too.

    ranks_MLRR   pairs of (token, rank that computes for it); the last axis is the destination
    nodes_MLRN   pairs of (token, node with ranks that compute for it)
    """

    ranks_MLRR: Int[ndarray, "M L R R2"]
    nodes_MLRN: Int[ndarray, "M L R N"]

    def of_micro_batches(self, number_M: Int64[ndarray, " M"]) -> DistinctRows:
        """Return the counts of some micro-batches, in the given order."""
        return DistinctRows(ranks_MLRR=self.ranks_MLRR[number_M], nodes_MLRN=self.nodes_MLRN[number_M])


def distinct_rows(
    experts_TK: Shaped[ndarray, "T K"],
    source_T: Int[ndarray, " T"],
    split: TokenSplit,
    num_ranks: int,
    ranks_per_node: int,
) -> tuple[Int64[ndarray, "R R2"], Int64[ndarray, "R N"]]:
    """Return distinct (token, rank) and (token, node) pairs by source rank, in one (micro-batch, layer).

    experts_TK   choices of the tokens, in the order of the trace
    source_T     rank that each token is fed from
    split        `split_tokens` of the same tokens
    """
    starts_E1 = np.searchsorted(split.expert_I, np.arange(int(split.expert_I.max(initial=-1)) + 2))
    ranks_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    nodes_RN = np.zeros((num_ranks, num_ranks // ranks_per_node), dtype=np.int64)
    arrays = experts_TK.astype(np.int64), source_T.astype(np.int64), starts_E1, split.rank_I, split.tokens_RI.copy()
    _count_distinct(*arrays, ranks_per_node, ranks_RR, nodes_RN)
    return ranks_RR, nodes_RN


@compiled
@no_type_check
def _count_distinct(experts_TK, source_T, starts_E1, rank_I, left_RI, ranks_per_node, ranks_RR, nodes_RN) -> None:
    T, K = experts_TK.shape
    last_R, last_N = np.full(len(ranks_RR), -1, np.int64), np.full(nodes_RN.shape[1], -1, np.int64)
    for t in range(T):
        s = source_T[t]
        for k in range(K):
            i = starts_E1[experts_TK[t, k]]
            while left_RI[s, i] == 0:  # the first instance with room; margins are exact, so there is one
                i += 1
            left_RI[s, i] -= 1
            d = rank_I[i]
            if last_R[d] != t:
                last_R[d] = t
                ranks_RR[s, d] += 1
            n = d // ranks_per_node
            if last_N[n] != t:
                last_N[n] = t
                nodes_RN[s, n] += 1


def distinct_rows_of_step(
    plan: Placement, demand: ScheduledDemand, experts_TLK: Shaped[ndarray, "T L K"], sample_T: Int[ndarray, " T"]
) -> DistinctRows:
    """Return the distinct rows of every micro-batch and layer of a plan.

    demand        with the schedule of the plan
    experts_TLK   choices of the tokens, in the order of the trace
    sample_T      position of each token's sample in the demand; -1: in none (`demand_rows.sample_of_rows`)
    """
    M, L, R, _ = demand.tokens_MLRE.shape
    micro_batch_T = np.where(sample_T >= 0, demand.micro_batch_S[sample_T], -1)
    ranks_MLRR: Int32[ndarray, "M L R R2"] = np.zeros((M, L, R, R), dtype=np.int32)
    nodes_MLRN: Int32[ndarray, "M L R N"] = np.zeros((M, L, R, plan.num_nodes), dtype=np.int32)
    tokens_MLRE = demand.tokens_MLRE

    def count(m: int) -> None:
        rows = np.flatnonzero(micro_batch_T == m)
        source_t = demand.rank_S[sample_T[rows]]
        for layer in range(L):
            at = (m, layer)
            arrays = (tokens_MLRE[at], plan.home_LE[layer], plan.replica_MLRB[at], plan.quota_MLRB[at])
            split = split_tokens(*arrays, plan.ranks_per_node)
            counted = distinct_rows(experts_TLK[rows, layer], source_t, split, R, plan.ranks_per_node)
            ranks_MLRR[at], nodes_MLRN[at] = counted

    parallel_map(count, M)
    return DistinctRows(ranks_MLRR=ranks_MLRR, nodes_MLRN=nodes_MLRN)
