"""Homes of a whole step by annealing: the search of `nodes_and_ranks` in every layer, with weights of this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.exchange import rows_per_crossing
from relibra.planning.loads import tokens_of_domains
from relibra.planning.relibra_paper.annealing import COLD, WARM
from relibra.planning.relibra_paper.nodes_and_ranks import HomeWeights, place_homes
from relibra.routing.demand import ScheduledDemand

Objective = Literal["seconds", "tokens"]

_SWAPS_OF_A_STEP = {"tokens": 60_000_000, "seconds": 15_000_000}
"""Swaps x micro-batches x layers that one annealing of all layers may evaluate, by objective; about 25 ns each, twice
that with the network. Four times as many lower the seconds of a step with replicas by a thousandth."""
_SWAPS_OF_A_LAYER = {"tokens": 100_000, "seconds": 40_000}
"""Most swaps of one layer."""
_MICRO_BATCHES = 32
"""Homes are searched on every k-th micro-batch, k = M // 32: 32 to 63 of them, or all of fewer."""
_MOVES_OF_ALL = 0.01
"""With the token objective: what moving all experts of a layer costs, as a share of the mean load."""


def home_weights(
    request: PlacementRequest, demand: ScheduledDemand, num_domains: int, objective: Objective
) -> HomeWeights:
    """Return the seconds of network and moves relative to compute on this cluster, or small weights of moves.

    Homes are balanced over domains: nodes, or ranks without replicas. A token-slot costs a rank 3 x forward flops; one
    that enters or leaves its domain 4 rows (dispatch and combine, forward and backward) on the slowest link, with
    hierarchical dispatch its share of them (`rows_per_crossing`); an expert that moves its weights, master copy and
    moments, over the links of all domains, in one of the steps that it serves.
    With the token objective only moves weigh, and only after a planned step: those that change next to nothing are not
    made.
    """
    cluster, expert = request.cluster, request.expert
    if objective == "tokens":
        if not request.warm:
            return HomeWeights()
        _, L, E = demand.load_MLE.shape
        of_all = _MOVES_OF_ALL * float(demand.load_MLE.sum()) / max(1, L) / E
        return HomeWeights(move=of_all / num_domains, move_inside=of_all / cluster.num_ranks)
    compute = 3 * expert.flops_per_token_slot / cluster.flops_per_second
    rate = cluster.slowest_bytes_per_second
    state_bytes = expert.state_bytes / request.budget.steps_served
    return HomeWeights(
        network=4 * rows_per_crossing(cluster, demand, request.previous.home_LE) * expert.row_bytes / rate / compute,
        move=state_bytes / rate / num_domains / compute,
        move_inside=state_bytes / cluster.intra.bytes_per_second / cluster.ranks_per_node / compute,
    )


def search_homes(request: PlacementRequest, demand: ScheduledDemand, objective: Objective) -> Int64[ndarray, "L E"]:
    """Return homes of every layer, annealed from those before the step.

    After a planned step they stay near these: a low first temperature and an eighth of the swaps.
    """
    every = max(1, len(demand.tokens_MLRE) // _MICRO_BATCHES)
    load_MLE, afresh = demand.load_MLE[::every], not request.warm
    M, L, E = load_MLE.shape
    # without replicas every rank is a domain
    per_domain = request.cluster.ranks_per_node if request.slots else 1
    domains = request.cluster.num_ranks // per_domain
    weights = home_weights(request, demand, domains, objective)
    proposals = int(np.clip(_SWAPS_OF_A_STEP[objective] // max(1, M * L), 4_000, _SWAPS_OF_A_LAYER[objective]))
    proposals //= (1 if afresh else 8) * (2 if weights.network else 1)  # the network term doubles the work of a swap
    # a micro-batch stands for others, whose compute and network the moves are weighed against
    weights = replace(weights, move=weights.move / every, move_inside=weights.move_inside / every)
    previous_LE = request.previous.home_LE.astype(np.int64)

    def place(layer: int) -> ndarray:
        source_MNE = np.zeros((M, domains, E), dtype=np.int64)
        if weights.network:
            source_MNE = tokens_of_domains(demand.tokens_MLRE, layer, domains, every=every)
        return place_homes(
            np.ascontiguousarray(load_MLE[:, layer]),
            source_MNE,
            previous_LE[layer],
            per_domain,
            weights=weights,
            temperature=COLD if afresh else WARM,
            proposals=proposals,
            seed=int(demand.layer_ids[layer]),
        )

    return np.stack(parallel_map(place, L))
