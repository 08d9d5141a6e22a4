"""The static layout of plain expert parallelism: expert e on rank e // (E / R), no replicas."""

from __future__ import annotations

from relibra.planning.balancer import PlacementRequest
from relibra.planning.placement import Placement
from relibra.routing.statistics import contiguous_homes


def decide(request: PlacementRequest) -> Placement:
    """Return the static layout, or the previous homes if homes may not move."""
    home_LE = request.previous.home_LE.copy()
    if request.budget.move_homes:
        home_LE[:] = contiguous_homes(home_LE.shape[1], request.cluster.num_ranks)
    return request.placement(home_LE, *request.empty_slots())
