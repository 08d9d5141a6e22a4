"""After FlexMoE (arXiv 2304.03946; no official code): copies of hot experts grow, copies of cold ones shrink.

Sees history. Free slots are filled first (*expand*: the expert with most load per copy, on the least loaded rank).
The rest is that of the port in LAER-MoE's artifact: at most ten rounds, in which each node gives a copy of the coldest
expert to the hottest one, while balance improves; tokens go to copies on the own node first. Different from the port:
the start is the previous homes, experts need not have a copy on every node, and nothing is divided by the load of an
empty rank.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.physical_placement import count_copies
from relibra.planning.baselines.from_physical import placement_from_physical
from relibra.planning.placement import Placement

ROUNDS = 10


def decide(request: PlacementRequest) -> Placement:
    """Grow and shrink copies of every layer from past totals, and share tokens on the own node first."""
    home_LE = request.previous.home_LE.copy()
    R, N, B = request.cluster.num_ranks, request.cluster.num_nodes, request.slots
    L, E = home_LE.shape
    placement_LRP = np.empty((L, R, E // R + B), dtype=np.int64)
    for layer, total_E in enumerate(request.total_LE):
        homes_Rk = np.argsort(home_LE[layer], kind="stable").reshape(R, E // R)
        empty_RB = np.full((R, B), -1, dtype=np.int64)
        start_RP = np.concatenate([homes_Rk, empty_RB], axis=1)
        placement_LRP[layer] = grow_and_shrink(expand(start_RP, total_E), total_E, N)
    return placement_from_physical(request, placement_LRP, "local first")


def expand(placement_RP: Int64[ndarray, "R P"], load_E: Float64[ndarray, " E"]) -> Int64[ndarray, "R P"]:
    """Return a placement whose empty slots (-1) hold the expert with most load per copy.

    Each copy goes to the least loaded rank with an empty slot, if possible one without that expert.
    """
    placement_RP = placement_RP.copy()
    while (placement_RP < 0).any():
        load_R, share_E = _loads(placement_RP, load_E)
        hot = int(np.argmax(share_E))
        held_R = (placement_RP == hot).any(axis=1)
        free_R = (placement_RP < 0).any(axis=1)
        choice_R = free_R & ~held_R if (free_R & ~held_R).any() else free_R
        rank = int(np.argmin(np.where(choice_R, load_R, np.inf)))
        placement_RP[rank, np.argmax(placement_RP[rank] < 0)] = hot
    return placement_RP


def grow_and_shrink(
    placement_RP: Int64[ndarray, "R P"], load_E: Float64[ndarray, " E"], num_nodes: int
) -> Int64[ndarray, "R P"]:
    """Move copies from the coldest to the hottest expert while the fullest rank or its ratio to the emptiest falls."""
    load_R, share_E = _loads(placement_RP, load_E)
    for _ in range(ROUNDS):
        count_E = np.bincount(placement_RP.ravel(), minlength=len(load_E))
        hot = int(np.argmax(share_E))
        cold = int(np.argmin(np.where(count_E > 1, share_E, np.inf)))
        if hot == cold or count_E[cold] < 2 or load_R.max() <= load_R.min():
            break
        changed_RP = placement_RP.copy()
        for ranks in np.split(np.arange(len(placement_RP)), num_nodes):
            if (changed_RP == cold).sum() > 1:
                _trade(changed_RP, ranks, hot, cold, load_R, share_E)
        after_R, after_E = _loads(changed_RP, load_E)
        if after_R.max() >= load_R.max() and after_R.max() * load_R.min() >= load_R.max() * after_R.min():
            break
        placement_RP, load_R, share_E = changed_RP, after_R, after_E
    return placement_RP


def _loads(placement_RP: ndarray, load_E: ndarray) -> tuple[ndarray, ndarray]:
    """Return the load of each rank under an even split, and load per copy of each expert."""
    copies_RE = count_copies(placement_RP, len(load_E))
    share_E = load_E / np.maximum(1, copies_RE.sum(axis=0))
    return copies_RE @ share_E, share_E


def _trade(placement_RP: ndarray, ranks: ndarray, hot: int, cold: int, load_R: ndarray, share_E: ndarray) -> None:
    """Give one slot of the cold expert on these ranks (one node) to the hot one, on a rank that has it if one does."""
    with_cold = ranks[(placement_RP[ranks] == cold).any(axis=1)]
    with_hot = ranks[(placement_RP[ranks] == hot).any(axis=1)]
    if not len(with_cold):
        return
    b = with_cold[np.argmin(load_R[with_cold])]
    slot = int(np.argmax(placement_RP[b] == cold))
    if not len(with_hot) or with_hot[0] == b:
        placement_RP[b, slot] = hot
        return
    a = with_hot[0]
    others = np.where(placement_RP[a] == hot, -np.inf, share_E[placement_RP[a]])
    if not np.isfinite(others).any():
        return  # nothing but copies of the hot expert there
    heaviest = int(np.argmax(others))
    placement_RP[b, slot] = placement_RP[a, heaviest]
    placement_RP[a, heaviest] = hot
