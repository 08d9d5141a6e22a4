"""Token split: how each source rank divides its tokens among the home and the replicas of an expert.

Integers with exact margins: every source sends all its tokens, every instance gets its quota. So the split sizes of
each all-to-all are known before the step, without an exchange of counts (ReLibra, arXiv 2605.08639; the order of
preference, same rank, same node, anywhere, after ForeMoE, arXiv 2606.11867).

Sources are processed in order against what is *left* of each quota, by largest remainder, so the quotas are met
exactly; rounding each source alone would miss them by a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.routing.compiled import compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSplit:
    """Split of one (micro-batch, layer): instances are ordered by expert, home first, then by rank.

    expert_I, rank_I   expert and rank of each instance; every expert has its home
    slot_I             spare slot that holds a replica, -1 for a home
    tokens_RI          token-slots that source rank R sends to the instance. The j-th token-slot of an expert on a
                       source (in trace order) goes to the first instance whose running sum exceeds j
    """

    expert_I: Int32[ndarray, " I"]
    rank_I: Int32[ndarray, " I"]
    slot_I: Int32[ndarray, " I"]
    tokens_RI: Int64[ndarray, "R I"]


def split_tokens(
    tokens_RE: Int[ndarray, "R E"],
    home_E: Int[ndarray, " E"],
    replica_RB: Int[ndarray, "R B"],
    quota_RB: Int[ndarray, "R B"],
    ranks_per_node: int,
) -> TokenSplit:
    """Split the token-slots of one (micro-batch, layer); the quotas of an expert's replicas sum to at most its load."""
    expert_I, rank_I, slot_I, quota_I = _instances(tokens_RE, home_E, replica_RB, quota_RB)
    tokens_RI = np.zeros((len(tokens_RE), len(expert_I)), dtype=np.int64)
    starts = np.searchsorted(expert_I, np.arange(len(home_E) + 1))
    _split_all(tokens_RE.astype(np.int64), starts, rank_I, quota_I, ranks_per_node, tokens_RI)
    return TokenSplit(expert_I=expert_I, rank_I=rank_I, slot_I=slot_I, tokens_RI=tokens_RI)


def _instances(
    tokens_RE: ndarray, home_E: ndarray, replica_RB: ndarray, quota_RB: ndarray
) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    rank_X, slot_X = np.nonzero(replica_RB >= 0)
    expert_X, quota_X = replica_RB[rank_X, slot_X], quota_RB[rank_X, slot_X].astype(np.int64)
    home_quota_E = tokens_RE.sum(axis=0, dtype=np.int64)
    np.subtract.at(home_quota_E, expert_X, quota_X)
    assert (home_quota_E >= 0).all(), "quotas of replicas exceed the load of their expert"
    E = len(home_E)
    expert_I = np.concatenate([np.arange(E), expert_X]).astype(np.int32)
    is_replica_I = np.arange(len(expert_I)) >= E
    rank_I = np.concatenate([home_E, rank_X]).astype(np.int32)
    slot_I = np.concatenate([np.full(E, -1), slot_X]).astype(np.int32)
    order = np.lexsort((slot_I, rank_I, is_replica_I, expert_I))
    return expert_I[order], rank_I[order], slot_I[order], np.concatenate([home_quota_E, quota_X])[order]


def traffic_MLRR(
    tokens_MLRE: Int32[ndarray, "M L R E"],
    home_LE: Int[ndarray, "L E"],
    replica_MLRB: Int16[ndarray, "M L R B"],
    quota_MLRB: Int32[ndarray, "M L R B"],
    ranks_per_node: int,
) -> Int64[ndarray, "M L R R2"]:
    """Return the token-slots that each source rank sends to each rank (last axis: destination), itself included."""
    M, L, R, _ = tokens_MLRE.shape
    traffic = np.zeros((M, L, R, R), dtype=np.int64)
    _count_traffic(tokens_MLRE, home_LE.astype(np.int64), replica_MLRB, quota_MLRB, ranks_per_node, traffic)
    return traffic


@compiled
@no_type_check
def _count_traffic(tokens_MLRE, home_LE, replica_MLRB, quota_MLRB, ranks_per_node, traffic) -> None:
    M, L, R, E = tokens_MLRE.shape
    B = replica_MLRB.shape[3]
    rank_I, left_I = np.empty(R * B + 1, np.int64), np.empty(R * B + 1, np.int64)
    remainder_I, open_X = np.empty(R * B + 1, np.int64), np.empty(R * B + 1, np.int64)
    supply_R, to_E, sent_R1 = np.empty(R, np.int64), np.empty(E, np.int64), np.empty(R + 1, np.int64)
    first_E, next_X = np.empty(E, np.int64), np.empty(R * B, np.int64)  # slots of each expert, by rank
    for m in range(M):
        for layer in range(L):
            tokens_RE, replica_RB, quota_RB = tokens_MLRE[m, layer], replica_MLRB[m, layer], quota_MLRB[m, layer]
            out_RR = traffic[m, layer]
            to_E[:] = home_LE[layer]
            first_E[:] = -1
            for x in range(R * B - 1, -1, -1):
                e = replica_RB[x // B, x % B]
                if e >= 0:
                    next_X[x], first_E[e] = first_E[e], x
                    to_E[e] = R  # split below
            for s in range(R):
                sent_R1[:] = 0
                for e in range(E):
                    sent_R1[to_E[e]] += tokens_RE[s, e]
                for d in range(R):
                    out_RR[s, d] += sent_R1[d]
            for e in range(E):
                x = first_E[e]
                if x < 0:
                    continue
                rank_I[0], left_I[0], n = home_LE[layer, e], 0, 1
                for s in range(R):
                    supply_R[s] = tokens_RE[s, e]
                    left_I[0] += supply_R[s]
                while x >= 0:
                    rank_I[n], left_I[n] = x // B, quota_RB[x // B, x % B]
                    left_I[0] -= left_I[n]
                    n, x = n + 1, next_X[x]
                split_expert(supply_R, rank_I[:n], left_I[:n], ranks_per_node, remainder_I, open_X, rank_I, out_RR)


@compiled
@no_type_check
def _split_all(tokens_RE, starts, rank_I, quota_I, ranks_per_node, tokens_RI) -> None:
    column_I = np.arange(len(rank_I))
    remainder_I, open_X = np.empty(len(rank_I), np.int64), np.empty(len(rank_I), np.int64)
    for e in range(len(starts) - 1):
        piece = slice(starts[e], starts[e + 1])
        supply_R, left_I = tokens_RE[:, e].copy(), quota_I[piece].copy()
        split_expert(
            supply_R, rank_I[piece], left_I, ranks_per_node, remainder_I, open_X, column_I, tokens_RI[:, piece]
        )


@compiled
@no_type_check
def split_expert(supply_R, rank_I, left_I, ranks_per_node, remainder_I, open_X, column_I, out_RX) -> None:
    """Add one expert's split to `out_RX`; uses up `supply_R` and `left_I`, whose sums are equal.

    In each range of ranks every source divides what it may give there among the instances in proportion to their
    remaining quotas. Leftovers of rounding down go to the largest remainders (ties: lower instance). A share never
    exceeds what is left, c: give x c / room < c unless give = room. One function: calls cost more than the work.

    remainder_I, open_X   working memory
    column_I              column of an instance in `out_RX`
    """
    R, n = len(supply_R), len(rank_I)
    for i in range(n):  # same rank
        s = rank_I[i]
        x = min(supply_R[s], left_I[i])
        out_RX[s, column_I[i]] += x
        supply_R[s] -= x
        left_I[i] -= x
    num_nodes = R // ranks_per_node
    for node in range(num_nodes + 1):  # same node; then anywhere
        low, high = (0, R) if node == num_nodes else (node * ranks_per_node, (node + 1) * ranks_per_node)
        room, wanted, x = 0, 0, 0
        for i in range(n):
            if low <= rank_I[i] < high and left_I[i] > 0:
                open_X[x] = i
                room += left_I[i]
                x += 1
        if room == 0:
            continue
        for s in range(low, high):
            wanted += supply_R[s]
        for s in range(low, high):
            give = supply_R[s] if wanted <= room else supply_R[s] * room // wanted
            wanted -= supply_R[s]
            supply_R[s] -= give
            if x == 1:
                out_RX[s, column_I[open_X[0]]] += give
                left_I[open_X[0]] -= give
            elif give > 0:
                missing = give
                for y in range(x):
                    i = open_X[y]
                    share = give * left_I[i] // room
                    remainder_I[i] = give * left_I[i] - share * room
                    out_RX[s, column_I[i]] += share
                    left_I[i] -= share
                    missing -= share
                for _ in range(missing):
                    best = open_X[0]
                    for y in range(1, x):
                        if remainder_I[open_X[y]] > remainder_I[best]:
                            best = open_X[y]
                    remainder_I[best] = 0
                    out_RX[s, column_I[best]] += 1
                    left_I[best] -= 1
            room -= give
            if room == 0 or wanted == 0:
                break
