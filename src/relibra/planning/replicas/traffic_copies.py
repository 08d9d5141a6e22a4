"""Copies that keep tokens inside their node: the hottest remote experts of a node, for its own tokens.

Copies for balance (`planning.replicas.replication`) ignore the source of tokens. Links between nodes are far slower
than experts (an overlap ratio far below 1, MegaScale-MoE, arXiv 2505.11432), and a copy that attention hides costs
nothing: so a node holds copies of the remote experts with most of its tokens, chosen per (micro-batch, layer).

These copies take part of each rank's slots; the balancing step treats each as one more expert of that rank. The other
slots balance the remaining load inside the nodes.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.planning.replicas.further_replicas import replicate_further
from relibra.routing.compiled import compiled


def replicate_for_traffic(
    tokens_MRE: Int[ndarray, "M R E"],
    home_E: Int[ndarray, " E"],
    ranks_per_node: int,
    *,
    slots: int,
    traffic_slots: int,
    most_per_home: int,
    tolerance: float = 0.0,
) -> tuple[Int16[ndarray, "M R B"], Int32[ndarray, "M R B"]]:
    """Return the replicas of one layer for each micro-batch: first against traffic between nodes, then for balance.

    tokens_MRE      token-slots that each source rank sends to each expert
    traffic_slots   of the `slots` of each rank, those that may hold copies from other nodes; they come first
    most_per_home   at most so many copies leave one home rank, counted as (node, expert) pairs. Balancing may split a
                    copy over several ranks of the node; the home then sends one copy for each
    returns         expert per slot (-1: empty) and its token-slots
    """
    M, R, E = tokens_MRE.shape
    home_E = home_E.astype(np.int64)
    source_MNE = tokens_MRE.reshape(M, R // ranks_per_node, ranks_per_node, E).sum(axis=2, dtype=np.int64)
    held_MRB = np.full((M, R, traffic_slots), -1, dtype=np.int64)
    taken_MRB = np.zeros((M, R, traffic_slots), dtype=np.int64)
    load_ME = source_MNE.sum(axis=1)
    _choose_hottest(source_MNE, load_ME, home_E, ranks_per_node, most_per_home, held_MRB, taken_MRB)
    taken_MRB, even_MRB, quota_MRB = replicate_further(
        load_ME, home_E, held_MRB, taken_MRB, ranks_per_node, slots=slots - traffic_slots, tolerance=tolerance
    )
    held_MRB[taken_MRB == 0] = -1
    replica_MRB = np.concatenate([held_MRB.astype(np.int16), even_MRB], axis=2)
    return replica_MRB, np.concatenate([taken_MRB, quota_MRB], axis=2)


def hottest_remote_experts(
    source_XE: Int[ndarray, "X E"], home_E: Int[ndarray, " E"], ranks_per_domain: int, slots: int
) -> Int64[ndarray, "R B"]:
    """Return the remote experts with most of a domain's own token-slots, in the slots of its ranks; -1: empty.

    source_XE   token-slots that each domain (a node, or a rank) sends to each expert
    """
    R = len(source_XE) * ranks_per_domain
    held_1RB = np.full((1, R, slots), -1, dtype=np.int64)
    source_1XE = source_XE[None].astype(np.int64)
    unlimited = source_XE.size
    _choose_hottest(
        source_1XE, source_1XE.sum(axis=1), home_E, ranks_per_domain, unlimited, held_1RB, np.zeros_like(held_1RB)
    )
    return held_1RB[0]


@compiled
@no_type_check
def _choose_hottest(source_MNE, load_ME, home_E, ranks_per_node, most_per_home, held_MRB, taken_MRB) -> None:
    """Assign slots to (node, expert) pairs by falling tokens, on the least loaded rank of the node with room."""
    M, E = len(source_MNE), source_MNE.shape[2]
    R, B = held_MRB.shape[1:]
    G = ranks_per_node
    load_R, copies_R, free_R = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
    for m in range(M):
        load_R[:] = 0
        copies_R[:] = 0
        free_R[:] = B
        for e in range(E):
            load_R[home_E[e]] += load_ME[m, e]
        for pair in np.argsort(-source_MNE[m].ravel(), kind="mergesort"):
            node, e = pair // E, pair % E
            home, tokens = home_E[e], source_MNE[m, node, e]
            if tokens == 0:
                break
            if home // G == node or copies_R[home] >= most_per_home:
                continue
            best = -1
            for r in range(node * G, (node + 1) * G):
                if free_R[r] > 0 and (best < 0 or load_R[r] < load_R[best]):
                    best = r
            if best < 0:
                continue
            held_MRB[m, best, B - free_R[best]] = e
            taken_MRB[m, best, B - free_R[best]] = tokens
            free_R[best] -= 1
            copies_R[home] += 1
            load_R[best] += tokens
            load_R[home] -= tokens
