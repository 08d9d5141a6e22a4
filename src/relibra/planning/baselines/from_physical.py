"""Convert a physical placement of EPLB and its family to homes, replicas and quotas.

Such planners fill all `E / R + B` slots of a rank and keep them for the whole step. Here every expert has one *home*
(the copy that owns the optimizer state), exactly E / R of them on every rank; all other copies are replicas. Two copies
of an expert on one rank are one instance, and the second slot is wasted, as in EPLB.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Int, Int16, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.physical_placement import choose_homes_among_copies, count_copies
from relibra.planning.balancers.shares import even_quotas, local_first_quotas, optimal_quotas
from relibra.planning.placement import Placement

Split = Literal["even", "optimal", "local first"]


def placement_from_physical(request: PlacementRequest, physical_LRP: Int[ndarray, "L R P"], split: Split) -> Placement:
    """Return a physical placement as a `Placement` whose replicas stay for the whole step.

    physical_LRP   expert in each of the P = E / R + B slots of a rank; -1: empty
    split          how every micro-batch shares its load over the copies (`relibra.planning.balancers.shares`)
    """
    demand, budget, cluster = request.demand, request.budget, request.cluster
    M, L, R, E = demand.tokens_MLRE.shape
    load_MLE, before_LE = demand.load_MLE, request.previous.home_LE.copy()
    home_LE = np.empty((L, E), dtype=np.int16)
    replica_MLRB = np.full((M, L, R, request.slots), -1, dtype=np.int16)
    quota_MLRB = np.zeros((M, L, R, request.slots), dtype=np.int32)
    for layer in range(L):
        copies_RE = count_copies(physical_LRP[layer], E)
        home_E = before_LE[layer].astype(np.int64)
        if budget.move_homes:
            share_E = request.total_LE[layer] / np.maximum(1, copies_RE.sum(axis=0))
            home_E, copies_RE = choose_homes_among_copies(copies_RE, home_E, share_E, request.slots)
        replica_RB, copies_RB = _assign_slots(copies_RE, home_E, request.total_LE[layer], request.slots)
        home_copies_E = copies_RE[home_E, np.arange(E)]
        load_ME = load_MLE[:, layer]
        if split == "even":
            quota_MRB = even_quotas(load_ME, home_E, home_copies_E, replica_RB, copies_RB)
        elif split == "optimal":
            quota_MRB = optimal_quotas(load_ME, home_E, replica_RB)
        else:
            quota_MRB = local_first_quotas(
                demand.tokens_MLRE[:, layer], home_E, home_copies_E, replica_RB, copies_RB, cluster.ranks_per_node
            )
        home_LE[layer], replica_MLRB[:, layer], quota_MLRB[:, layer] = home_E, replica_RB, quota_MRB
    return request.placement(home_LE, replica_MLRB, quota_MLRB, resident=True, scope="cluster")


def _assign_slots(
    copies_RE: Int64[ndarray, "R E"], home_E: Int64[ndarray, " E"], total_E: ndarray, slots: int
) -> tuple[Int16[ndarray, "R B"], Int64[ndarray, "R B"]]:
    """Return the experts in spare slots, those not at home on the rank, and how many copies each has there.

    If a rank has more of them than slots, those with the largest shares are kept.
    """
    R = len(copies_RE)
    share_RE = copies_RE * (total_E / np.maximum(1, copies_RE.sum(axis=0)))
    replica_RB = np.full((R, slots), -1, dtype=np.int16)
    copies_RB = np.zeros((R, slots), dtype=np.int64)
    for rank in range(R):
        guests = np.flatnonzero((copies_RE[rank] > 0) & (home_E != rank))
        kept = np.sort(guests[np.argsort(-share_RE[rank, guests], kind="stable")[:slots]])
        replica_RB[rank, : len(kept)] = kept
        copies_RB[rank, : len(kept)] = copies_RE[rank, kept]
    return replica_RB, copies_RB
