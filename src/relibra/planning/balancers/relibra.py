"""relibra: homes, schedule, replicas and cross-node copies of a step from known routes (after ReLibra and ForeMoE).

ReLibra (arXiv 2605.08639) has no public code. Own parts: chained replication, packing against nodes, cross-node copies
in slots shared by both kinds, and the search of the ceiling per (micro-batch, layer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int16, Int32, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.schedules import pack_groups, place_near_experts
from relibra.planning.costs.compute import busiest_attention_seconds
from relibra.planning.home_search.annealing import COLD, WARM
from relibra.planning.home_search.nodes_and_ranks import HomeWeights, co_activation_groups, place_homes
from relibra.planning.placement import Placement
from relibra.planning.replicas.pricing import cheapest_replicas, choose_replicas, moving_seconds, seconds
from relibra.planning.schedule.limits import ScheduleLimits
from relibra.planning.search.deadline import Deadline
from relibra.planning.search.parallel_map import parallel_map
from relibra.routing.demand import ScheduledDemand

_SWAPS_OF_A_STEP = 60_000_000
"""Swaps x micro-batches x layers that one annealing of all layers may evaluate; about 15 ns each."""
_PACKING_ROUNDS = 2


def decide(request: PlacementRequest) -> Placement:
    """Choose homes, then replicas; with packing also schedule, homes and replicas for it, and return the cheaper plan.

    A deadline limits the search of homes and schedule; replicas are always placed.
    """
    budget, demand = request.budget, request.demand
    clock = Deadline(budget.deadline_seconds)
    limits = ScheduleLimits.of_demand(demand, rank_tokens=budget.rank_tokens, token_slack=budget.token_slack)
    home_LE = request.previous.home_LE.astype(np.int64)
    if budget.move_homes:
        home_LE = _search_homes(request, demand, home_LE, clock, first=not request.warm)
    chosen = _choose_replicas(request, demand, home_LE, limits, clock)
    if budget.pack_samples and request.cluster.num_nodes > 1 and clock.allows(0.5):
        packed = _choose_replicas(request, *_pack(request, home_LE, limits, clock), limits, clock)
        accepted = 1 + (budget.tolerance if budget.objective == "tokens" else 0)
        if _cost(request, packed) * accepted < _cost(request, chosen):
            chosen = packed
    return request.placement(
        chosen.home_LE,
        chosen.replica_MLRB,
        chosen.quota_MLRB,
        scope="cluster" if budget.cross_node_copies else "node",
        schedule=chosen.demand,
        cut_short=clock.missed,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
    """A complete choice: demand under its schedule, homes, replicas and their quotas."""

    demand: ScheduledDemand
    home_LE: Int64[ndarray, "L E"]
    replica_MLRB: Int16[ndarray, "M L R B"]
    quota_MLRB: Int32[ndarray, "M L R B"]


def _cost(request: PlacementRequest, choice: _Choice) -> float:
    """Return the objective of a choice: seconds of the step with moves, or token-slots of the busiest ranks."""
    homes_and_replicas = choice.home_LE, choice.replica_MLRB, choice.quota_MLRB
    if request.budget.objective == "tokens":
        placement = request.placement(*homes_and_replicas, schedule=choice.demand)
        return float(placement.rank_load(choice.demand).max(axis=2, initial=0).sum())
    attention = busiest_attention_seconds(choice.demand, request.cluster, request.expert)
    of_layers = float(seconds(request, choice.demand, *homes_and_replicas).sum())
    return of_layers + attention + moving_seconds(request, choice.home_LE)


def _pack(
    request: PlacementRequest, home_LE: ndarray, limits: ScheduleLimits, clock: Deadline
) -> tuple[ScheduledDemand, ndarray]:
    """Pack samples into micro-batches and search homes for them, alternating."""
    demand = request.demand
    for round_number in range(_PACKING_ROUNDS):
        if round_number and not clock.allows(0.5):
            break
        demand = pack_groups(request, demand, home_LE, limits, seed=request.budget.seed + round_number)
        if request.budget.move_homes:
            home_LE = _search_homes(request, demand, home_LE, clock, first=False)
    return demand, home_LE


def _choose_replicas(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, limits: ScheduleLimits, clock: Deadline
) -> _Choice:
    """Place samples near their experts where that saves time, then choose replicas, and homes that pay for moves."""
    budget = request.budget
    if budget.place_samples and clock.allows(0.7):
        demand = place_near_experts(request, demand, home_LE, limits)
    if budget.objective == "tokens":
        replica_MLRB, quota_MLRB = choose_replicas(
            request, demand, home_LE, budget.tolerance, cross_node=budget.cross_node_copies
        )
    else:
        previous_LE = request.previous.home_LE.astype(np.int64)
        home_LE, replica_MLRB, quota_MLRB = _choose_cheaper_homes(request, demand, home_LE, previous_LE, clock)
    return _Choice(demand=demand, home_LE=home_LE, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB)


def _choose_cheaper_homes(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, previous_LE: ndarray, clock: Deadline
) -> tuple[ndarray, ndarray, ndarray]:
    """Price replicas under the new and the previous homes; every layer takes the cheaper, moves included.

    A layer's moves are priced as if spread evenly over the ranks. If all moves together, with their real distribution,
    cost more than they save, no expert moves.
    """
    cluster = request.cluster
    replica_MLRB, quota_MLRB, new_ML = cheapest_replicas(request, demand, home_LE, clock, share=0.8)
    if np.array_equal(home_LE, previous_LE):
        return home_LE, replica_MLRB, quota_MLRB
    kept_replica, kept_quota, kept_ML = cheapest_replicas(request, demand, previous_LE, clock, share=0.95)
    move_seconds = request.expert.state_bytes / _slowest_link(cluster)
    moved_L = (home_LE != previous_LE).sum(axis=1) / cluster.num_ranks
    new_L, kept_L = new_ML.sum(axis=0), kept_ML.sum(axis=0)
    stays_L = kept_L <= new_L + moved_L * move_seconds
    mixed_LE = np.where(stays_L[:, None], previous_LE, home_LE)
    saved = (kept_L - new_L)[~stays_L].sum()
    if saved <= moving_seconds(request, mixed_LE):
        return previous_LE, kept_replica, kept_quota
    replica_MLRB[:, stays_L], quota_MLRB[:, stays_L] = kept_replica[:, stays_L], kept_quota[:, stays_L]
    return mixed_LE, replica_MLRB, quota_MLRB


def home_weights(request: PlacementRequest, num_domains: int) -> HomeWeights:
    """Return the seconds of network and moves relative to compute on this cluster; 0 with the token objective.

    Homes are balanced over domains: nodes, or ranks without replicas. A token-slot costs a rank 3 x forward flops; one
    that enters or leaves its domain 4 rows (dispatch and combine, forward and backward) on the slowest link; an expert
    that moves its weights, master copy and moments, over the links of all domains.
    """
    if request.budget.objective == "tokens":
        return HomeWeights()
    cluster, expert = request.cluster, request.expert
    compute = 3 * expert.flops_per_token_slot / cluster.flops_per_second
    rate = _slowest_link(cluster)
    return HomeWeights(
        network=4 * expert.row_bytes / rate / compute,
        move=expert.state_bytes / rate / num_domains / compute,
        move_inside=expert.state_bytes / cluster.intra.bytes_per_second / cluster.ranks_per_node / compute,
    )


def _slowest_link(cluster: Cluster) -> float:
    """Return bytes per second between nodes, or inside a single node."""
    if cluster.num_nodes == 1:
        return cluster.intra.bytes_per_second
    return min(cluster.inter_send.bytes_per_second, cluster.inter_receive.bytes_per_second)


def _search_homes(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, clock: Deadline, *, first: bool
) -> ndarray:
    """Search homes of every layer; `first`: from scratch, otherwise near the given homes.

    With a deadline, in rounds of growing effort, each from the last homes, while the next one fits.
    """
    M, L, _ = demand.load_MLE.shape
    # without replicas every rank is a domain
    per_domain = request.cluster.ranks_per_node if request.budget.slots else 1
    weights = home_weights(request, request.cluster.num_ranks // per_domain)
    proposals = int(np.clip(_SWAPS_OF_A_STEP // max(1, M * L), 4_000, 100_000))
    proposals //= (1 if first else 8) * (2 if weights.network else 1)  # the network term doubles the work of a swap
    if clock.seconds is None:
        return _anneal_homes(request, demand, home_LE, per_domain, weights, proposals, first=first)
    seconds = 0.0
    for effort in (64, 16, 4, 1):
        if not clock.allows(0.6, estimate=4 * seconds):
            break
        start = clock.elapsed()
        home_LE = _anneal_homes(request, demand, home_LE, per_domain, weights, proposals // effort, first=first)
        seconds = clock.elapsed() - start
    return home_LE


def _anneal_homes(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: ndarray,
    per_domain: int,
    weights: HomeWeights,
    proposals: int,
    *,
    first: bool,
) -> ndarray:
    cluster = request.cluster
    load_MLE = demand.load_MLE
    M, L, E = load_MLE.shape
    previous_LE = request.previous.home_LE.astype(np.int64)
    domains = cluster.num_ranks // per_domain

    def place(layer: int) -> ndarray:
        load_ME = np.ascontiguousarray(load_MLE[:, layer])
        source_MNE = np.zeros((M, domains, E), dtype=np.int64)
        if weights.network:
            source_MRE = demand.tokens_MLRE[:, layer]
            source_MNE = source_MRE.reshape(M, domains, per_domain, E).sum(axis=2, dtype=np.int64)
        start_E = home_LE[layer] // per_domain
        if first and weights.network and demand.pairs_LEE is not None and np.array_equal(home_LE, previous_LE):
            start_E = co_activation_groups(demand.pairs_LEE[layer], domains)
        return place_homes(
            load_ME,
            source_MNE,
            previous_LE[layer],
            per_domain,
            weights=weights,
            temperature=COLD if first else WARM,
            proposals=proposals,
            seed=request.budget.seed * 1_000_003 + layer,
            start_node_E=start_E,
        )

    return np.stack(parallel_map(place, L, request.budget.threads))
