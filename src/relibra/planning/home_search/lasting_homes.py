"""Homes that last: after a planned step, experts move only where that also pays for routes that nobody planned from.

New homes serve the steps to come, whose samples are others. What suits the samples of one step best is moved again in
the next one. So homes are chosen from every other micro-batch and must pay in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.home_search.step_homes import slowest_link
from relibra.routing.demand import ScheduledDemand

Propose = Callable[[PlacementRequest, ScheduledDemand], Int64[ndarray, "L E"]]
"""Return homes for a demand."""
Price = Callable[[PlacementRequest, ScheduledDemand, Int64[ndarray, "L E"]], Float64[ndarray, "M L"]]
"""Return what each micro-batch and layer costs with some homes, without moves."""

_WORTH_MOVING_AGAIN = 0.05
"""Share of the seconds that homes must save to replace those of a planned step, beside the time of the moves."""
_LEAST_PRICED = 2
"""Micro-batches that a saving must be seen in: of one nothing is sure."""


def lasting_homes(
    request: PlacementRequest, demand: ScheduledDemand, proposals: Sequence[Propose], price: Price
) -> Int64[ndarray, "L E"]:
    """Return new homes in the layers where they save enough in micro-batches that they were not chosen from.

    A proposal counts if it saves enough in all layers together, and then in the layers where it surely does: some of
    many layers seem to save by chance.
    """
    previous_LE = request.previous.home_LE.astype(np.int64)
    if len(demand.tokens_MLRE) < 2 * _LEAST_PRICED:
        return previous_LE
    chosen_on, priced_on = _halves(demand)
    kept_ML = price(request, priced_on, previous_LE)
    worth_L = _WORTH_MOVING_AGAIN * kept_ML.sum(axis=0)
    best_LE, best_L = previous_LE.copy(), worth_L.copy()
    for propose in proposals:
        home_LE = propose(request, chosen_on)
        if np.array_equal(home_LE, previous_LE):
            continue
        saved_ML = kept_ML - price(request, priced_on, home_LE)
        moving_L = moving_share_L(request, home_LE) / 2  # half of the micro-batches pay half of the moves
        if saved_ML.sum() - moving_L.sum() > worth_L.sum():
            net_L = _surely_saved(saved_ML) - moving_L
            better_L = net_L > best_L
            best_LE[better_L], best_L[better_L] = home_LE[better_L], net_L[better_L]
    return best_LE


def _surely_saved(saved_ML: Float64[ndarray, "M L"]) -> Float64[ndarray, " L"]:
    """Return the sum over micro-batches, of which there are two or more, less its standard error."""
    M = len(saved_ML)
    surely_L: ndarray = saved_ML.sum(axis=0) - np.sqrt(M) * saved_ML.std(axis=0, ddof=1)
    return surely_L


def moving_share_L(request: PlacementRequest, home_LE: Int64[ndarray, "L E"]) -> Float64[ndarray, " L"]:
    """Return the seconds per step of each layer's moves, as if spread evenly over ranks; 0 with the token objective.

    Their seconds on one link / number of ranks / `steps_served`.
    """
    if request.budget.objective == "tokens":
        return np.zeros(len(home_LE))
    cluster, expert = request.cluster, request.expert
    before_LE = request.previous.home_LE
    node_LE = home_LE // cluster.ranks_per_node
    across_L = (before_LE // cluster.ranks_per_node != node_LE).sum(axis=1)
    inside_L = (before_LE != home_LE).sum(axis=1) - across_L
    seconds_L = across_L / slowest_link(cluster) + inside_L / cluster.intra.bytes_per_second
    return seconds_L * expert.state_bytes / cluster.num_ranks / request.budget.steps_served


def _halves(demand: ScheduledDemand) -> tuple[ScheduledDemand, ScheduledDemand]:
    """Return every other micro-batch, and the rest; samples of others are left out."""
    number_M = np.arange(len(demand.tokens_MLRE))
    return demand.of_micro_batches(number_M[0::2]), demand.of_micro_batches(number_M[1::2])
