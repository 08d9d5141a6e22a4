"""The pilot of a step: a few layers and micro-batches, on which choices are priced before all layers are planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.routing.demand import ScheduledDemand

_PILOT_LAYERS = 6
"""Layers on which ways are priced before the best ones are tried on all."""
_PILOT_MICRO_BATCHES, _PILOT_OF_LARGE_STEP = 32, 16
"""Micro-batches of these layers that ways are priced on; up to twice as many, to end with a group (`pilot_of`)."""
BEST_WAYS = 2
"""Ways that are tried on all layers, and each layer takes the cheaper one."""
_LARGE_STEP = 1024
"""Layers x micro-batches above which the best way alone is tried on all layers: a second one lowers the seconds by less
than they differ between two draws of samples."""


def pilot_layers(home_LE: ndarray) -> Int64[ndarray, " l"]:
    """Return the layers of the pilot, as positions on the layer axis."""
    return np.unique(np.linspace(0, len(home_LE) - 1, _PILOT_LAYERS).astype(np.int64))


def pilot_of(request: PlacementRequest, demand: ScheduledDemand, micro_batches: int | None = None) -> PlacementRequest:
    """Return the request for a few layers, evenly spaced, of a demand.

    micro_batches   the first so many, and the rest of the group of the last one unless they are then more than twice as
                    many; None: all. `steps_served` grows by M / kept, so that the kept micro-batches pay their share of
                    the moves
    """
    M, served = len(demand.tokens_MLRE), request.budget.steps_served
    if micro_batches is not None and micro_batches < M:
        group_M = np.zeros(M, dtype=np.int32) if demand.group_M is None else demand.group_M
        end_of_group = int(np.searchsorted(group_M, group_M[micro_batches - 1], side="right"))
        kept = end_of_group if end_of_group <= 2 * micro_batches else micro_batches
        demand, served = demand.of_micro_batches(slice(kept)), round(served * M / kept)
    first = replace(request, demand=demand, budget=replace(request.budget, steps_served=served))
    return first.of_layers(pilot_layers(request.previous.home_LE))


def is_large(demand: ScheduledDemand) -> bool:
    """Return whether the best way alone is tried on all layers of a demand."""
    M, L, _ = demand.load_MLE.shape
    return M * L > _LARGE_STEP


def ways_tried(demand: ScheduledDemand) -> int:
    """Return how many ways are tried on all layers of a demand."""
    return 1 if is_large(demand) else BEST_WAYS


def pilot_micro_batches(demand: ScheduledDemand) -> int:
    """Return on how many micro-batches of a demand ways are priced."""
    return _PILOT_OF_LARGE_STEP if is_large(demand) else _PILOT_MICRO_BATCHES
