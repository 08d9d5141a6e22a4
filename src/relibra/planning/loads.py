"""Rank loads of homes and replicas, for plans, bounds and solvers."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.routing.compiled import compiled


def home_rank_load(
    load_MLE: Int64[ndarray, "M L E"], home_LE: Int[ndarray, "L E"], num_ranks: int
) -> Int64[ndarray, "M L R"]:
    """Return the load of the experts at home on each rank (or node, given node numbers)."""
    M, L, _ = load_MLE.shape
    load_MLR = np.zeros((M, L, num_ranks), dtype=np.int64)
    for layer in range(L):
        order = np.argsort(home_LE[layer], kind="stable")
        here = np.flatnonzero(np.bincount(home_LE[layer], minlength=num_ranks))
        starts = np.searchsorted(home_LE[layer][order], here)
        load_MLR[:, layer, here] = np.add.reduceat(load_MLE[:, layer, order], starts, axis=1)
    return load_MLR


def replica_load_change(
    replica_MLRB: Int16[ndarray, "M L R B"], quota_MLRB: Int32[ndarray, "M L R B"], home_LE: Int[ndarray, "L E"]
) -> Int64[ndarray, "M L R"]:
    """Return the load that replicas add to their ranks and take from the homes of their experts."""
    M, L, R, _ = replica_MLRB.shape
    change_MLR = np.zeros((M, L, R), dtype=np.int64)
    micro_batch_X, layer_X, rank_X, slot_X = np.nonzero(replica_MLRB >= 0)
    expert_X = replica_MLRB[micro_batch_X, layer_X, rank_X, slot_X]
    quota_X = quota_MLRB[micro_batch_X, layer_X, rank_X, slot_X]
    np.add.at(change_MLR, (micro_batch_X, layer_X, rank_X), quota_X)
    np.subtract.at(change_MLR, (micro_batch_X, layer_X, home_LE[layer_X, expert_X]), quota_X)
    return change_MLR


def tokens_of_domains(
    tokens_MLRE: Int32[ndarray, "M L R E"], layer: int, num_domains: int, *, every: int = 1
) -> Int64[ndarray, "m X E"]:
    """Return the token-slots that each of X domains of neighbouring ranks sends to each expert of a layer.

    every   only each `every`-th micro-batch is counted, the first included
    """
    M, _, _, E = tokens_MLRE.shape
    tokens_mXE = np.zeros((len(range(0, M, every)), num_domains, E), dtype=np.int64)
    _add_ranks(tokens_MLRE, layer, every, tokens_mXE)
    return tokens_mXE


@compiled
@no_type_check
def _add_ranks(tokens_MLRE, layer, every, tokens_mXE) -> None:
    _, _, R, E = tokens_MLRE.shape
    count, X, _ = tokens_mXE.shape
    for m in range(count):
        for r in range(R):
            tokens_E, sum_E = tokens_MLRE[m * every, layer, r], tokens_mXE[m, r // (R // X)]
            for e in range(E):
                sum_E[e] += tokens_E[e]
