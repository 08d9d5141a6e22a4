"""LPLB, DeepSeek's linear-programming balancer (github.com/deepseek-ai/LPLB): replicas on a fixed graph, optimal flow.

EPLB orders the experts without replicas, from expert totals; the c-th heaviest expert of a rank then has one copy on a
neighbour in a fixed graph, and per micro-batch a linear program decides how much flows along each edge. Different from
the original: one exact flow over the whole group in integers, where it runs an approximate interior-point solver per
graph; graphs for any number of ranks, not only those it ships.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.baselines.eplb import eplb_placement
from relibra.planning.baselines.from_physical import placement_from_physical
from relibra.planning.placement import Placement

CUBE = ([3, 0, 1, 2, 7, 4, 5, 6], [6, 7, 4, 5, 0, 1, 2, 3])
"""Two edge sets of a cube, as LPLB ships it for 8 ranks."""


def decide(request: PlacementRequest) -> Placement:
    """Copy the heaviest experts of each rank to its neighbours, and split each micro-batch optimally."""
    R, B = request.cluster.num_ranks, request.slots
    L, E = request.total_LE.shape
    origin_CR = topology(R, B)
    placement_LRP = np.full((L, R, E // R + B), -1, dtype=np.int64)
    for layer, total_E in enumerate(request.total_LE):
        homes_Rk = eplb_placement(total_E, E, 1, 1, R)[0].reshape(R, E // R)
        order_Rk = np.argsort(-total_E[homes_Rk], axis=1, kind="stable")
        heaviest_Rk = np.take_along_axis(homes_Rk, order_Rk, axis=1)
        placement_LRP[layer, :, : E // R] = homes_Rk
        for c in range(min(B, E // R)):
            origin_R = origin_CR[c % len(origin_CR)]
            placement_LRP[layer, :, E // R + c] = np.where(origin_R == np.arange(R), -1, heaviest_Rk[origin_R, c])
    return placement_from_physical(request, placement_LRP, "optimal")


def topology(num_ranks: int, slots: int) -> Int64[ndarray, "C R"]:
    """Choose the graph: per edge set C, the rank whose experts are copied to rank R. More slots use the sets again.

    One slot: a ring. 8 ranks: a cube; 16: a hypercube; else the squarest torus, which is a ring for primes.
    """
    rank_R = np.arange(num_ranks)
    ring_R = (rank_R + 1) % num_ranks
    if slots <= 1:
        return ring_R[None]
    if num_ranks == 8:
        return np.array(CUBE)
    if num_ranks == 16:
        rings_R = rank_R // 4 * 4 + (rank_R + 3) % 4
        return np.stack([rings_R, (rank_R - 4) % 16])
    columns = next(n for n in range(int(num_ranks**0.5), 0, -1) if num_ranks % n == 0)
    if columns == 1:
        return np.stack([ring_R, (rank_R + 2) % num_ranks])
    row_R, column_R = np.divmod(rank_R, columns)
    down_R = (row_R + 1) % (num_ranks // columns) * columns + column_R
    return np.stack([down_R, row_R * columns + (column_R + 1) % columns])
