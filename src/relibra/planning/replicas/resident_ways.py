"""Ways to fill the resident slots of a step: how many are for traffic, how even, how far from home."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.loads import tokens_of_domains
from relibra.planning.replicas.further_replicas import replicate_further
from relibra.planning.replicas.pricing import Replicas
from relibra.planning.replicas.resident_replicas import keep_replicas
from relibra.planning.search.parallel_map import parallel_map
from relibra.routing.demand import ScheduledDemand

LOOSE = 0.05
"""A tolerance that is priced beside the budget's own."""


@dataclass(frozen=True, kw_only=True)
class ResidentWay:
    """One way to fill resident slots.

    traffic_slots   slots that hold what a domain's own token-slots want most; the others even out loads. A domain is a
                    node; on a single node, a rank
    tolerance       accepted load of the busiest rank above the mean, as a share
    cross_node        replicas may be on nodes without the expert
    local           replicas take token-slots of their own domain first; False: all start at the homes
    deal_again      homes are first dealt again to the ranks of their nodes (`step_homes.deal_inside_nodes`)
    """

    traffic_slots: int = 0
    tolerance: float
    cross_node: bool
    local: bool = False
    deal_again: bool = False


NO_REPLICAS = ResidentWay(tolerance=1e6, cross_node=False)
"""Any load of the busiest rank is accepted."""


def first_ways(request: PlacementRequest) -> list[ResidentWay]:
    """Return the ways priced first, replicas as far from home as the budget allows.

    One lets replicas take from homes only; the others have each number of traffic slots, with and without dealing homes
    again. The tolerance is the larger one of the budget's and `LOOSE`.
    """
    budget, cluster = request.budget, request.cluster
    slots, cross_node = budget.resident_slots or 0, budget.cross_node_copies and cluster.num_nodes > 1
    way = ResidentWay(tolerance=max(budget.tolerance, LOOSE), cross_node=cross_node, local=True)
    may_hold_traffic = cross_node or cluster.num_nodes == 1
    numbers = sorted({0, slots // 2, slots - 1, slots}) if may_hold_traffic else [0]
    several = request.previous.num_experts > cluster.num_ranks and cluster.num_nodes > 1
    deals = (False, True) if budget.move_homes and several else (False,)
    from_homes = replace(way, local=False)  # fewer, larger GEMMs where micro-batches are small
    return [from_homes, *(replace(way, traffic_slots=t, deal_again=deal) for t in numbers for deal in deals)]


def variants(request: PlacementRequest, way: ResidentWay) -> list[ResidentWay]:
    """Return ways with the same slots for traffic: evener, or with replicas only on nodes that have the expert.

    Even loads are tried too: where attention hides copies, the budget's tolerance saves nothing.
    """
    tolerances, scopes = sorted({0.0, request.budget.tolerance, way.tolerance}), sorted({way.cross_node, False})
    deals = sorted({way.deal_again, False})
    return [replace(way, tolerance=t, cross_node=s, deal_again=d) for t in tolerances for s in scopes for d in deals]


def fill_resident_slots(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int64[ndarray, "L E"], way: ResidentWay
) -> Replicas:
    """Return the replicas of every layer in resident slots; shared slots are empty."""
    cluster, budget = request.cluster, request.budget
    resident = budget.resident_slots or 0
    load_MLE = demand.load_MLE
    M, L, _ = load_MLE.shape
    replica_MLRB = np.full((M, L, cluster.num_ranks, budget.slots), -1, dtype=np.int16)
    quota_MLRB = np.zeros(replica_MLRB.shape, dtype=np.int32)

    def fill(layer: int) -> None:
        replica_MRB, quota_MRB = keep_replicas(
            np.ascontiguousarray(load_MLE[:, layer]),
            home_LE[layer],
            cluster.num_ranks,
            cluster.ranks_per_node,
            slots=resident,
            tolerance=way.tolerance,
            cross_node=way.cross_node,
            group_M=demand.group_M,
            source_MXE=source_of_domains(request, demand, layer) if way.local else None,
            traffic_slots=way.traffic_slots,
        )
        replica_MLRB[:, layer, :, :resident], quota_MLRB[:, layer, :, :resident] = replica_MRB, quota_MRB

    parallel_map(fill, L, budget.threads)
    return replica_MLRB, quota_MLRB


def source_of_domains(request: PlacementRequest, demand: ScheduledDemand, layer: int) -> Int64[ndarray, "M X E"]:
    """Return the token-slots that each node sends to each expert; on a single node, those of each rank."""
    cluster = request.cluster
    X = cluster.num_nodes if cluster.num_nodes > 1 else cluster.num_ranks
    return tokens_of_domains(demand.tokens_MLRE, layer, X)


def fill_shared_slots(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int[ndarray, "L E"],
    replicas: Replicas,
    *,
    tolerance: float,
    cross_node: bool,
) -> Replicas:
    """Return the replicas with further ones in shared slots, where they lower the busiest rank."""
    cluster, budget = request.cluster, request.budget
    resident = budget.resident_slots or 0
    replica_MLRB, quota_MLRB = (array.copy() for array in replicas)

    def fill(layer: int) -> None:
        given = slice(0, resident)
        taken_MRB, further_MRX, quota_MRX = replicate_further(
            np.ascontiguousarray(demand.load_MLE[:, layer]),
            home_LE[layer],
            replica_MLRB[:, layer, :, given],
            quota_MLRB[:, layer, :, given],
            cluster.ranks_per_node,
            slots=budget.slots - resident,
            tolerance=tolerance,
            cross_node=cross_node,
        )
        quota_MLRB[:, layer, :, given] = taken_MRB
        replica_MLRB[:, layer, :, resident:], quota_MLRB[:, layer, :, resident:] = further_MRX, quota_MRX

    parallel_map(fill, len(home_LE), budget.threads)
    return replica_MLRB, quota_MLRB
