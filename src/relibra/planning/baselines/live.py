"""Live: replicas from the router's output of the present micro-batch, as UltraEP and MoonEP decide.

Sees the exact loads of one (micro-batch, layer), after gating. Homes never move, copies stay inside their node. The
solver is that of relibra's own plans (`relibra.planning.levers.replication`), so that live balancing and a plan from
known routes differ in what they know and when, not in how well they solve. `relibra.parallel.balance_live` calls
`solve_layer` inside each layer; `decide` gives the same replicas for a step whose routes are known, to compare with.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int16, Int32
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.levers.replication import replicate
from relibra.planning.placement import Placement

TOLERANCE = 0.01
"""Share by which the busiest rank may exceed the lowest reachable load, for fewer copies."""


def decide(request: PlacementRequest) -> Placement:
    """Solve each (micro-batch, layer) by itself, homes as they are."""
    cluster, budget, load_MLE = request.cluster, request.budget, request.demand.load_MLE
    home_LE = request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()
    for layer in range(home_LE.shape[0]):
        replica_MLRB[:, layer], quota_MLRB[:, layer] = replicate(
            np.ascontiguousarray(load_MLE[:, layer], dtype=np.int64),
            home_LE[layer],
            cluster.num_ranks,
            cluster.ranks_per_node,
            slots=request.slots,
            tolerance=budget.tolerance,
        )
    return request.placement(home_LE, replica_MLRB, quota_MLRB)


def solve_layer(
    load_E: Int[ndarray, " E"],
    home_E: Int[ndarray, " E"],
    num_ranks: int,
    ranks_per_node: int,
    *,
    slots: int,
    tolerance: float = TOLERANCE,
) -> tuple[Int16[ndarray, "R B"], Int32[ndarray, "R B"]]:
    """Return the replicas of one layer in one micro-batch; equal input gives equal output, on every rank.

    load_E     token-slots of each expert, from all ranks
    home_E     home rank of each expert
    returns    expert per slot (-1: empty) and its token-slots
    """
    replica_1RB, quota_1RB = replicate(
        np.ascontiguousarray(load_E, dtype=np.int64)[None],
        home_E,
        num_ranks,
        ranks_per_node,
        slots=slots,
        tolerance=tolerance,
    )
    return replica_1RB[0], quota_1RB[0]
