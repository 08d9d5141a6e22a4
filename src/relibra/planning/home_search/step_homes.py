"""Homes of a whole step: the search of `planning.home_search` in every layer, with weights of this machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.exchange import rows_per_crossing
from relibra.planning.home_search.annealing import COLD, WARM
from relibra.planning.home_search.nodes_and_ranks import (
    HomeWeights,
    co_activation_groups,
    place_homes,
    ranks_inside_nodes,
)
from relibra.planning.loads import tokens_of_domains
from relibra.planning.replicas.traffic_copies import hottest_remote_experts
from relibra.planning.search.deadline import Deadline
from relibra.planning.search.parallel_map import parallel_map
from relibra.routing.demand import ScheduledDemand

_SWAPS_OF_A_STEP = {"tokens": 60_000_000, "seconds": 15_000_000}
"""Swaps x micro-batches x layers that one annealing of all layers may evaluate, by objective; about 25 ns each, twice
that with the network. Four times as many lower the seconds of a step with replicas by a thousandth."""
_SWAPS_OF_A_LAYER = {"tokens": 100_000, "seconds": 40_000}
"""Most swaps of one layer."""
_SWAPS_OF_A_DEAL, _SWAPS_OF_A_NODE = 2_500_000, 1_000
"""The same for dealing homes again to the ranks of their nodes, and the most of one node and layer."""
_MICRO_BATCHES = 32
"""Homes are searched on every k-th micro-batch, k = M // 32: 32 to 63 of them, or all of fewer."""
_MOVES_OF_ALL = 0.01
"""With the token objective: what moving all experts of a layer costs, as a share of the mean load."""


def home_weights(request: PlacementRequest, demand: ScheduledDemand, num_domains: int) -> HomeWeights:
    """Return the seconds of network and moves relative to compute on this cluster, or small weights of moves.

    Homes are balanced over domains: nodes, or ranks without replicas. A token-slot costs a rank 3 x forward flops; one
    that enters or leaves its domain 4 rows (dispatch and combine, forward and backward) on the slowest link, with
    hierarchical dispatch its share of them (`rows_per_crossing`); an expert that moves its weights, master copy and
    moments, over the links of all domains, in one of the steps that it serves.
    With the token objective only moves weigh, and only after a planned step: those that change next to nothing are not
    made.
    """
    cluster, expert = request.cluster, request.expert
    if request.budget.objective == "tokens":
        if not request.warm:
            return HomeWeights()
        _, L, E = demand.load_MLE.shape
        of_all = _MOVES_OF_ALL * float(demand.load_MLE.sum()) / max(1, L) / E
        return HomeWeights(move=of_all / num_domains, move_inside=of_all / cluster.num_ranks)
    compute = 3 * expert.flops_per_token_slot / cluster.flops_per_second
    rate = slowest_link(cluster)
    state_bytes = expert.state_bytes / request.budget.steps_served
    return HomeWeights(
        network=4 * rows_per_crossing(cluster, demand, request.previous.home_LE) * expert.row_bytes / rate / compute,
        move=state_bytes / rate / num_domains / compute,
        move_inside=state_bytes / cluster.intra.bytes_per_second / cluster.ranks_per_node / compute,
    )


def slowest_link(cluster: Cluster) -> float:
    """Return bytes per second between nodes, or inside a single node."""
    if cluster.num_nodes == 1:
        return cluster.intra.bytes_per_second
    return min(cluster.inter_send.bytes_per_second, cluster.inter_receive.bytes_per_second)


def search_homes(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int64[ndarray, "L E"],
    clock: Deadline,
    *,
    afresh: bool,
    share: float = 1.0,
) -> Int64[ndarray, "L E"]:
    """Search homes of every layer.

    With a deadline, in rounds of growing effort, each from the last homes, while the next one fits.

    afresh   high first temperature and 8 times as many swaps, and from the homes before the step groups of experts that
             are picked together as the start, if pairs are known; False: near the given homes
    share    part of the step's layers that the demand holds
    """
    M, L, _ = demand.load_MLE[:: _spacing(demand)].shape
    # without replicas every rank is a domain
    per_domain = request.cluster.ranks_per_node if request.budget.slots else 1
    weights = home_weights(request, demand, request.cluster.num_ranks // per_domain)
    objective = request.budget.objective or "tokens"
    proposals = int(np.clip(share * _SWAPS_OF_A_STEP[objective] // max(1, M * L), 4_000, _SWAPS_OF_A_LAYER[objective]))
    proposals //= (1 if afresh else 8) * (2 if weights.network else 1)  # the network term doubles the work of a swap
    if clock.seconds is None:
        return _anneal_homes(request, demand, home_LE, per_domain, weights, proposals, afresh=afresh)
    seconds = 0.0
    for effort in (64, 16, 4, 1):
        if not clock.allows(0.6, estimate=4 * seconds):
            break
        start = clock.elapsed()
        home_LE = _anneal_homes(request, demand, home_LE, per_domain, weights, proposals // effort, afresh=afresh)
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
    afresh: bool,
) -> ndarray:
    every = _spacing(demand)
    load_MLE = demand.load_MLE[::every]
    M, L, E = load_MLE.shape
    # a micro-batch stands for others, whose compute and network the moves are weighed against
    weights = replace(weights, move=weights.move / every, move_inside=weights.move_inside / every)
    previous_LE = request.previous.home_LE.astype(np.int64)
    domains = request.cluster.num_ranks // per_domain

    def place(layer: int) -> ndarray:
        load_ME = np.ascontiguousarray(load_MLE[:, layer])
        source_MNE = np.zeros((M, domains, E), dtype=np.int64)
        if weights.network:
            source_MNE = tokens_of_domains(demand.tokens_MLRE, layer, domains, every=every)
        start_E = home_LE[layer] // per_domain
        if afresh and weights.network and demand.pairs_LEE is not None and np.array_equal(home_LE, previous_LE):
            start_E = co_activation_groups(demand.pairs_LEE[layer], domains)
        return place_homes(
            load_ME,
            source_MNE,
            previous_LE[layer],
            per_domain,
            weights=weights,
            temperature=COLD if afresh else WARM,
            proposals=proposals,
            seed=request.budget.seed * 1_000_003 + int(demand.layer_ids[layer]),
            start_node_E=start_E,
        )

    return np.stack(parallel_map(place, L, request.budget.threads))


def _spacing(demand: ScheduledDemand) -> int:
    """Return k: homes are searched on every k-th micro-batch."""
    return max(1, len(demand.tokens_MLRE) // _MICRO_BATCHES)


def deal_inside_nodes(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int64[ndarray, "L E"], traffic_slots: int
) -> Int64[ndarray, "L E"]:
    """Return homes on other ranks of their nodes, so that ranks receive evenly much from other nodes.

    Token-slots stay on their node where the expert is at home there, or in one of its slots for traffic. With
    hierarchical dispatch relays get the rows from other nodes, whatever the homes, and forward them inside.
    """
    cluster, budget = request.cluster, request.budget
    every = _spacing(demand)
    load_MLE = demand.load_MLE[::every]
    M, L, _ = load_MLE.shape
    G, N = cluster.ranks_per_node, cluster.num_nodes
    # in token-slots that cross the network, or are forwarded; moves inside a node go over all its links
    rate = cluster.intra.bytes_per_second if cluster.dispatch == "hierarchical" else slowest_link(cluster)
    row_seconds = 4 * request.expert.row_bytes / rate
    move = request.expert.state_bytes / budget.steps_served / cluster.intra.bytes_per_second / G / row_seconds / every
    proposals = int(np.clip(_SWAPS_OF_A_DEAL // max(1, M * L * N), 200, _SWAPS_OF_A_NODE))

    def deal(layer: int) -> ndarray:
        home_E, load_ME = home_LE[layer], load_MLE[:, layer].copy()
        source_MNE = tokens_of_domains(demand.tokens_MLRE, layer, N, every=every)
        held_RB = hottest_remote_experts(source_MNE.sum(axis=0), home_E, G, traffic_slots)
        for node in range(N):
            held = np.unique(held_RB[node * G : (node + 1) * G])
            stays = np.concatenate([held[held >= 0], np.flatnonzero(home_E // G == node)])
            load_ME[:, stays] -= source_MNE[:, node, stays]
        return ranks_inside_nodes(
            load_ME, home_E // G, home_E, G, N,
            move=move, proposals=proposals, seed=budget.seed * 1_000_003 + int(demand.layer_ids[layer]),
        )  # fmt: skip

    return np.stack(parallel_map(deal, L, budget.threads))
