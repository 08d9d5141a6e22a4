"""Homes of a whole step by annealing: the search of `nodes_and_ranks` in every layer, with prices of this machine."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.balancer import PlacementRequest
from relibra.planning.levers.homes import SwapPrices, swap_prices
from relibra.planning.loads import tokens_of_domains
from relibra.planning.relibra_paper.annealing import COLD, WARM
from relibra.planning.relibra_paper.nodes_and_ranks import place_homes
from relibra.routing.demand import ScheduledDemand

Objective = Literal["seconds", "tokens"]

_SWAPS_OF_A_STEP = {"tokens": 60_000_000, "seconds": 15_000_000}
"""Swaps x micro-batches x layers that one annealing of all layers may evaluate, by objective; about 25 ns each, twice
that with the network. Four times as many lower the seconds of a step with replicas by a thousandth."""
_SWAPS_OF_A_LAYER = {"tokens": 100_000, "seconds": 40_000}
"""Most swaps of one layer."""
_MICRO_BATCHES = 32
"""Homes are searched on every k-th micro-batch, k = M // 32: on 32 to 63 of them, or on all if fewer."""
_MOVES_OF_ALL = 0.01
"""With the token objective: what moving all experts of a layer costs, as a share of the mean load."""


def _token_prices(request: PlacementRequest, demand: ScheduledDemand, num_domains: int, every: int) -> SwapPrices:
    """Return small prices that prevent moves with next to no effect; 0 where no step was planned before.

    num_domains, every   as for `swap_prices`
    """
    if not request.warm:
        return SwapPrices()
    _, L, E = demand.load_MLE.shape
    of_all = _MOVES_OF_ALL * float(demand.load_MLE.sum()) / max(1, L) / E
    return SwapPrices(move=of_all / num_domains / every, move_inside=of_all / request.cluster.num_ranks / every)


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
    if objective == "seconds":
        prices = swap_prices(request, demand, domains, every=every)
    else:
        prices = _token_prices(request, demand, domains, every)
    proposals = int(np.clip(_SWAPS_OF_A_STEP[objective] // max(1, M * L), 4_000, _SWAPS_OF_A_LAYER[objective]))
    proposals //= (1 if afresh else 8) * (2 if prices.network else 1)  # the network term doubles the work of a swap
    previous_LE = request.previous.home_LE.astype(np.int64)

    def place(layer: int) -> ndarray:
        source_MNE = np.zeros((M, domains, E), dtype=np.int64)
        if prices.network:
            source_MNE = tokens_of_domains(demand.tokens_MLRE, layer, domains, every=every)
        return place_homes(
            np.ascontiguousarray(load_MLE[:, layer]),
            source_MNE,
            previous_LE[layer],
            per_domain,
            prices=prices,
            temperature=COLD if afresh else WARM,
            proposals=proposals,
            seed=int(demand.layer_ids[layer]),
        )

    return np.stack(parallel_map(place, L))
