"""Replicas beside given ones: these count as experts at home on their ranks, other slots even out the rest."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.planning.replicas.replication import replicate
from relibra.routing.compiled import compiled


def replicate_further(
    load_ME: Int64[ndarray, "M E"],
    home_E: Int[ndarray, " E"],
    held_MRB: Int[ndarray, "M R B"],
    taken_MRB: Int[ndarray, "M R B"],
    ranks_per_node: int,
    *,
    slots: int,
    tolerance: float,
    cross_node: bool = False,
) -> tuple[Int32[ndarray, "M R B"], Int16[ndarray, "M R X"], Int32[ndarray, "M R X"]]:
    """Return the token-slots of given replicas, and further replicas with theirs, of one layer.

    A further replica on a rank that has the expert already is not made: the instance there takes its token-slots.

    held_MRB, taken_MRB   experts of the given replicas (-1: none) and their token-slots
    slots                 X, slots of a rank for further replicas
    tolerance, cross_node as for `replicate`
    """
    M, R, B = held_MRB.shape
    E = len(home_E)
    home_E = home_E.astype(np.int64)
    held_MRB, taken_MRB = held_MRB.astype(np.int64), taken_MRB.astype(np.int64)
    m_X, rank_X, slot_X = np.nonzero(held_MRB >= 0)
    left_ME = load_ME.copy()
    np.subtract.at(left_ME, (m_X, held_MRB[m_X, rank_X, slot_X]), taken_MRB[m_X, rank_X, slot_X])
    # Given replicas are numbered as experts after the real ones.
    whole_ME = np.concatenate([left_ME, taken_MRB.reshape(M, R * B)], axis=1)
    whole_home_E = np.concatenate([home_E, np.repeat(np.arange(R), B)])
    further_MRX, quota_MRX = replicate(
        whole_ME, whole_home_E, R, ranks_per_node, slots=slots, tolerance=tolerance, cross_node=cross_node
    )
    _merge(E, home_E, held_MRB, taken_MRB, further_MRX, quota_MRX)
    return taken_MRB.astype(np.int32), further_MRX, quota_MRX


@compiled
@no_type_check
def _merge(num_experts, home_E, held_MRB, taken_MRB, further_MRX, quota_MRX) -> None:
    """Give further replicas the numbers of real experts, and one instance of an expert per rank."""
    M, R, X = further_MRX.shape
    B = held_MRB.shape[2]
    for m in range(M):
        for r in range(R):
            for x in range(X):
                e, tokens = np.int64(further_MRX[m, r, x]), quota_MRX[m, r, x]
                if e < 0:
                    continue
                if e >= num_experts:
                    from_rank, from_slot = (e - num_experts) // B, (e - num_experts) % B
                    taken_MRB[m, from_rank, from_slot] -= tokens
                    e = held_MRB[m, from_rank, from_slot]
                further_MRX[m, r, x] = e
                merged = home_E[e] == r
                for b in range(B):
                    if held_MRB[m, r, b] == e and not merged:
                        taken_MRB[m, r, b] += tokens
                        merged = True
                for y in range(x):
                    if further_MRX[m, r, y] == e and not merged:
                        quota_MRX[m, r, y] += tokens
                        merged = True
                if merged:
                    further_MRX[m, r, x], quota_MRX[m, r, x] = -1, 0
