"""relibra: homes, schedule, replicas and cross-node copies of a step from known routes (after ReLibra and ForeMoE).

ReLibra (arXiv 2605.08639) has no public code. Own parts: chained replication, packing against nodes, cross-node copies
in slots shared by both kinds, and the search of the ceiling per (micro-batch, layer).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.balancer import PlacementRequest
from relibra.planning.home_search.annealing import COLD, WARM
from relibra.planning.home_search.nodes_and_ranks import HomeWeights, co_activation_groups, place_homes
from relibra.planning.placement import Placement
from relibra.planning.replicas.pricing import cheapest_replicas, choose_replicas, moving_seconds
from relibra.planning.schedule.locality import place_samples
from relibra.planning.schedule.packing import PackingLimits, pack_samples
from relibra.planning.search.deadline import Deadline
from relibra.planning.search.parallel_map import parallel_map
from relibra.routing.demand import ScheduledDemand

_SWAPS_OF_A_STEP = 60_000_000
"""Swaps x micro-batches x layers that one annealing of all layers may evaluate; about 15 ns each."""
_PACKING_PROPOSALS = 400_000
_PACKING_ROUNDS = 2


def decide(request: PlacementRequest) -> Placement:
    """Choose homes, schedule, homes again if the schedule changed, then replicas; see `Budget`.

    A deadline limits the search of homes and schedule; replicas are always placed.
    """
    budget, demand = request.budget, request.demand
    clock = Deadline(budget.deadline_seconds)
    previous_LE = request.previous.home_LE.astype(np.int64)
    home_LE = previous_LE
    if budget.move_homes:
        home_LE = _search_homes(request, demand, home_LE, clock, first=not request.warm)
    if request.cluster.num_nodes > 1:
        demand, home_LE = _search_schedule(request, demand, home_LE, clock)
    if budget.objective == "tokens":
        replica_MLRB, quota_MLRB = choose_replicas(
            request, demand, home_LE, budget.tolerance, cross_node=budget.cross_node_copies
        )
    else:
        home_LE, replica_MLRB, quota_MLRB = _choose_cheaper_homes(request, demand, home_LE, previous_LE, clock)
    return request.placement(
        home_LE,
        replica_MLRB,
        quota_MLRB,
        scope="cluster" if budget.cross_node_copies else "node",
        schedule=demand,
        cut_short=clock.missed,
    )


def _search_schedule(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, clock: Deadline
) -> tuple[ScheduledDemand, ndarray]:
    """Pack samples into micro-batches and search homes for them, alternating; then assign samples to ranks."""
    budget, cluster = request.budget, request.cluster
    if budget.pack_samples:
        limits = PackingLimits.of_schedule(
            demand.micro_batch_S,
            _lengths(demand),
            token_slack=budget.token_slack,
            attention_slack=budget.attention_slack,
        )
        for round_number in range(_PACKING_ROUNDS):
            if not clock.allows(0.5):
                break
            demand = _pack_groups(request, demand, home_LE, limits, seed=budget.seed + round_number)
            if budget.move_homes:
                home_LE = _search_homes(request, demand, home_LE, clock, first=False)
    if budget.place_samples and clock.allows(0.7):
        share_SLN = _node_share(demand, home_LE, cluster.ranks_per_node, cluster.num_nodes)
        micro_batch_S, rank_S = demand.micro_batch_S, demand.rank_S
        new_rank_S = place_samples(share_SLN, micro_batch_S, rank_S, _lengths(demand), cluster.ranks_per_node)
        if not np.array_equal(rank_S, new_rank_S):
            demand = demand.with_schedule(micro_batch_S, new_rank_S, cluster.num_ranks, len(demand.load_MLE))
    return demand, home_LE


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


def _pack_groups(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, limits: PackingLimits, *, seed: int
) -> ScheduledDemand:
    """Pack the micro-batches of each expert-data-parallel group; a sample stays in its group."""
    cluster = request.cluster
    share_SLN = _node_share(demand, home_LE, cluster.ranks_per_node, cluster.num_nodes)
    micro_batch_S, rank_S = demand.micro_batch_S, demand.rank_S
    M = len(demand.load_MLE)
    group_M = np.zeros(M, dtype=np.int32) if demand.group_M is None else demand.group_M
    group_S = np.append(group_M, -1)[micro_batch_S]  # -1, left out, is the last entry
    for group in range(int(group_M.max(initial=-1)) + 1):
        packed_S, packed_rank_S = pack_samples(
            share_SLN,
            np.where(group_S == group, micro_batch_S, -1).astype(np.int32),
            rank_S,
            _lengths(demand),
            cluster.num_ranks,
            group_M == group,
            limits=limits,
            proposals=_PACKING_PROPOSALS,
            seed=seed,
        )
        micro_batch_S = np.where(group_S == group, packed_S, micro_batch_S).astype(np.int32)
        rank_S = np.where(group_S == group, packed_rank_S, rank_S).astype(np.int32)
    return demand.with_schedule(micro_batch_S, rank_S, cluster.num_ranks, M)


def _lengths(demand: ScheduledDemand) -> Int64[ndarray, " S"]:
    """Return the token-slots of each sample in one layer: its length times the choices per token."""
    return demand.counts_SLE[:, 0].sum(axis=1, dtype=np.int64)


def _node_share(
    demand: ScheduledDemand, home_LE: ndarray, ranks_per_node: int, num_nodes: int
) -> Float32[ndarray, "S L N"]:
    """Return each sample's token-slots at the experts of each node."""
    S, L, _ = demand.counts_SLE.shape
    share_SLN = np.empty((S, L, num_nodes), dtype=np.float32)
    for layer in range(L):
        for node in range(num_nodes):
            experts = np.flatnonzero(home_LE[layer] // ranks_per_node == node)
            share_SLN[:, layer, node] = demand.counts_SLE[:, layer, experts].sum(axis=1)
    return share_SLN
