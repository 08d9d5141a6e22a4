"""How many resident slots a step takes: memory is a limit, and where groups are short, fewer may take less time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.homes_and_replicas import cheapest_seconds
from relibra.planning.balancers.pilot import pilot_micro_batches, pilot_of
from relibra.planning.budget import Budget
from relibra.planning.home_search.step_homes import search_homes
from relibra.planning.search.deadline import Deadline
from relibra.routing.demand import ScheduledDemand

_SHORT_GROUP = 4
"""Mean micro-batches of a group below which a replica that stays may be pushed for too few of them."""


def may_take_fewer(budget: Budget, demand: ScheduledDemand) -> bool:
    """Return whether fewer resident slots than the budget's are priced too: for several short groups, in seconds."""
    if not budget.resident_slots or not budget.fewer_resident or budget.objective != "seconds":
        return False
    groups = 1 if demand.group_M is None else len(np.unique(demand.group_M))
    return groups > 1 and len(demand.tokens_MLRE) < _SHORT_GROUP * groups


def with_cheapest_resident_slots(request: PlacementRequest, clock: Deadline) -> PlacementRequest:
    """Return the request with all, half or none of its resident slots, whichever costs least in a few layers.

    Slots that are not resident are shared by all layers. The number is settled: it is not chosen again.
    """
    budget, demand = request.budget, request.demand
    if not may_take_fewer(budget, demand):
        return request
    pilot = pilot_of(request, demand, micro_batches=pilot_micro_batches(demand))
    before_LE = pilot.previous.home_LE.astype(np.int64)
    homes = [before_LE]
    if budget.move_homes and not request.warm:
        share = len(before_LE) / len(demand.layer_ids)
        homes.append(search_homes(pilot, pilot.demand, before_LE, clock, afresh=True, share=share))
    most = budget.resident_slots or 0
    seconds: dict[int, float] = {}
    for number in dict.fromkeys((most, most // 2, 0)):
        if seconds and not clock.allows(0.3):
            break
        part = replace(pilot, budget=replace(pilot.budget, resident_slots=number))
        seconds[number] = cheapest_seconds(part, homes, clock)
    best = min(seconds, key=seconds.__getitem__)
    return replace(request, budget=replace(budget, resident_slots=best, fewer_resident=False))
