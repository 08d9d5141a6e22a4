"""Replicas for traffic: the remote experts that a domain's own token-slots want most, in the slots of its ranks.

Links between nodes are far slower than experts (an overlap ratio far below 1, MegaScale-MoE, arXiv 2505.11432), so a
replica that takes its node's own token-slots saves more than one that evens out loads.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.routing.compiled import compiled


def hottest_remote_experts(
    source_XE: Int[ndarray, "X E"], home_E: Int[ndarray, " E"], ranks_per_domain: int, slots: int
) -> Int64[ndarray, "R B"]:
    """Return the remote experts with most of a domain's own token-slots, in the slots of its ranks; -1: empty.

    source_XE   token-slots that each domain (a node, or a rank) sends to each expert
    """
    held_RB = np.full((len(source_XE) * ranks_per_domain, slots), -1, dtype=np.int64)
    _choose_hottest(source_XE.astype(np.int64), home_E.astype(np.int64), ranks_per_domain, held_RB)
    return held_RB


@compiled
@no_type_check
def _choose_hottest(source_XE, home_E, ranks_per_domain, held_RB) -> None:
    """Assign slots to (domain, expert) pairs by falling tokens, on the least loaded rank of the domain with room."""
    E, (R, B), G = len(home_E), held_RB.shape, ranks_per_domain
    load_R, free_R = np.zeros(R, np.int64), np.full(R, B)
    for e in range(E):
        load_R[home_E[e]] += source_XE[:, e].sum()
    for pair in np.argsort(-source_XE.ravel(), kind="mergesort"):
        domain, e = pair // E, pair % E
        home, tokens = home_E[e], source_XE[domain, e]
        if tokens == 0:
            break
        if home // G == domain:
            continue
        best = -1
        for r in range(domain * G, (domain + 1) * G):
            if free_R[r] > 0 and (best < 0 or load_R[r] < load_R[best]):
                best = r
        if best >= 0:
            held_RB[best, B - free_R[best]] = e
            free_R[best] -= 1
            load_R[best] += tokens
            load_R[home] -= tokens
