"""Homes and replicas of every layer: the cheapest of several ways. Homes move where that pays, else they stay.

`demand` is the schedule that is priced; `request.demand` the given one.

With the token objective a (micro-batch, layer) costs its busiest rank / mean rank, and a little for each push; with
seconds what the cost model says. Ways to fill resident slots are first priced on a few layers, the best ones on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.layer_choices import LayerChoices
from relibra.planning.balancers.pilot import (
    BEST_WAYS,
    is_large,
    pilot_layers,
    pilot_micro_batches,
    pilot_of,
    ways_tried,
)
from relibra.planning.costs.copies import pushed_copies
from relibra.planning.home_search.lasting_homes import Propose, lasting_homes, moving_share_L
from relibra.planning.home_search.step_homes import deal_inside_nodes, search_homes
from relibra.planning.replicas.pricing import Replicas, all_moves_seconds, cheapest_replicas, evenest_replicas, seconds
from relibra.planning.replicas.resident_replicas import PUSH_PRICE
from relibra.planning.replicas.resident_ways import (
    LOOSE,
    NO_REPLICAS,
    ResidentWay,
    fill_resident_slots,
    fill_shared_slots,
    first_ways,
    variants,
)
from relibra.planning.search.deadline import Deadline
from relibra.routing.demand import ScheduledDemand

_WORTH_MOVING = 0.01
"""Three thresholds, as shares of a cost, because loads vary: what a layer may save at most for a search (tokens); what
moves must save in a few layers to be tried in all (seconds); what a layer must save to replace planned homes (both)."""
_WORTH_SHARING = 0.001
"""Share of the cost that shared slots must save in a few layers of a large step to be filled in all."""

Option = tuple[ndarray, ResidentWay]
"""Homes [layers, experts], and how resident slots are filled; the way may deal these homes again."""


def choose_homes_and_replicas(
    request: PlacementRequest, demand: ScheduledDemand, clock: Deadline
) -> tuple[LayerChoices, LayerChoices]:
    """Return the cheapest homes and replicas found for a schedule, and the cheapest replicas if homes stay.

    Where homes may move, they are found so:

    seconds, resident slots              `_cheapest_ways`; where homes move, the second value has no shared replicas
    tokens, resident slots               search in uneven layers only
    seconds, shared slots, planned step  only homes that last (`_search_lasting`)
    otherwise                            search in all layers
    """
    budget, previous_LE = request.budget, request.previous.home_LE.astype(np.int64)
    if budget.objective == "seconds" and budget.resident_slots:
        return _cheapest_ways(request, demand, clock)
    place = _evenest if budget.objective == "tokens" else partial(_cheapest_shared, clock=clock)
    kept = place(request, demand, previous_LE)
    if not budget.move_homes:
        return kept, kept
    if budget.resident_slots:
        home_LE = _search_uneven_layers(request, demand, kept, clock)
    elif budget.objective == "seconds" and request.warm:
        home_LE = _search_lasting(request, demand, clock)
    else:
        home_LE = search_homes(request, demand, previous_LE, clock, afresh=not request.warm)
    if np.array_equal(home_LE, previous_LE):
        return kept, kept
    return _move_where_it_pays(request, kept, place(request, demand, home_LE)), kept


def replicas_of_homes(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: Int64[ndarray, "L E"], clock: Deadline
) -> LayerChoices:
    """Return the cheapest replicas found for a schedule, with given homes."""
    homes = request.previous.with_home_ranks(home_LE.astype(np.int16))
    settled = replace(request, previous=homes, budget=replace(request.budget, move_homes=False))
    return choose_homes_and_replicas(settled, demand, clock)[0]


def cheapest_seconds(request: PlacementRequest, homes: list[Int64[ndarray, "L E"]], clock: Deadline) -> float:
    """Return the seconds of a small step, moves included, with its replicas and the cheapest of given homes per layer.

    homes   those before the step, and others that may be taken
    """
    demand, (before_LE, *others) = request.demand, homes
    if not request.budget.resident_slots:
        best = _cheapest_shared(request, demand, before_LE, clock=clock)
        for home_LE in others:
            best = _cheaper(request, demand, best, _cheapest_shared(request, demand, home_LE, clock=clock))
        return _total(request, best)
    ways = _rank_ways(request, clock)
    options = [(before_LE, way) for way in dict.fromkeys([*_staying(ways), *_moving(ways)])]
    options += [(home_LE, way) for home_LE in others for way in _moving(ways)]
    filled = _cheapest_of(request, demand, options)
    return _total(request, _with_shared_slots(request, demand, filled, _with_seconds))


def _evenest(request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray) -> LayerChoices:
    """Return replicas for even loads: in resident slots, and in shared ones what is still missing."""
    budget = request.budget
    if not budget.resident_slots:
        return _with_unevenness(request, demand, home_LE, evenest_replicas(request, demand, home_LE))
    way = ResidentWay(tolerance=budget.tolerance, cross_node=budget.cross_node_copies)
    chosen = _with_unevenness(request, demand, home_LE, fill_resident_slots(request, demand, home_LE, way))
    return _with_shared_slots(request, demand, chosen, _with_unevenness)


def _with_unevenness(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, replicas: Replicas
) -> LayerChoices:
    """Return choices that cost the busiest rank / the mean, and a little for each push."""
    resident_slots = request.budget.resident_slots or 0
    placement = request.placement(home_LE, *replicas, schedule=demand, scope="cluster", resident_slots=resident_slots)
    load_MLR = placement.rank_load(demand)
    mean_ML, top_ML = load_MLR.mean(axis=2), load_MLR.max(axis=2, initial=0)
    skew_ML = np.divide(top_ML, mean_ML, out=np.ones_like(mean_ML), where=mean_ML > 0)
    pushes_ML = sum(pushed.sum(axis=(2, 3)) for pushed in pushed_copies(placement)[:2])
    return _chosen(home_LE, replicas, skew_ML + PUSH_PRICE * pushes_ML)


def _with_seconds(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, replicas: Replicas
) -> LayerChoices:
    return _chosen(home_LE, replicas, seconds(request, demand, home_LE, *replicas, threads=request.budget.threads))


def _chosen(home_LE: ndarray, replicas: Replicas, cost_ML: ndarray) -> LayerChoices:
    return LayerChoices(home_LE=home_LE, replica_MLRB=replicas[0], quota_MLRB=replicas[1], cost_ML=cost_ML)


def _cheapest_shared(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, *, clock: Deadline
) -> LayerChoices:
    """Return the replicas in shared slots that cost the least seconds."""
    replica_MLRB, quota_MLRB, seconds_ML = cheapest_replicas(request, demand, home_LE, clock, share=0.9)
    return _chosen(home_LE, (replica_MLRB, quota_MLRB), seconds_ML)


def _search_uneven_layers(
    request: PlacementRequest, demand: ScheduledDemand, kept: LayerChoices, clock: Deadline
) -> ndarray:
    """Return homes searched in the layers that are uneven enough: no homes get below a busiest rank of the mean."""
    uneven = np.flatnonzero(kept.cost_ML.mean(axis=0) > (1 + _WORTH_MOVING) * (1 + request.budget.tolerance))
    home_LE = kept.home_LE.copy()
    if len(uneven) and clock.allows(0.5):
        part = replace(request, demand=demand).of_layers(uneven)
        home_LE[uneven] = search_homes(part, part.demand, home_LE[uneven], clock, afresh=not request.warm)
    return home_LE


def _move_where_it_pays(request: PlacementRequest, kept: LayerChoices, new: LayerChoices) -> LayerChoices:
    """Return for each layer the new homes where they save more than the moves cost, and more than noise.

    A layer's moves are priced as if spread evenly over the ranks. If all moves together, with their real distribution,
    cost more than they save, no expert moves.
    """
    saved_L = kept.cost_L - new.cost_L
    noise = _WORTH_MOVING if request.warm else 0.0
    moves_L = saved_L > noise * kept.cost_L + moving_share_L(request, new.home_LE)
    mixed = kept.with_layers(new, moves_L)
    if request.budget.objective == "seconds":
        moving = all_moves_seconds(request, mixed.home_LE) / request.budget.steps_served
        if saved_L[moves_L].sum() <= moving:
            return kept
    return mixed


def _search_lasting(request: PlacementRequest, demand: ScheduledDemand, clock: Deadline) -> ndarray:
    """Return searched homes in the layers where they last; where they do not in a few layers, no layer is searched."""

    def search_near(request: PlacementRequest, demand: ScheduledDemand) -> ndarray:
        return _searched(request, demand, clock, len(home_LE))

    def search_afresh(request: PlacementRequest, demand: ScheduledDemand) -> ndarray:
        return _searched(request, demand, clock, len(home_LE), afresh=True)

    def price(request: PlacementRequest, demand: ScheduledDemand, homes_LE: ndarray) -> ndarray:
        return _cheapest_shared(request, demand, homes_LE, clock=clock).cost_ML

    home_LE = request.previous.home_LE.astype(np.int64)
    pilot = pilot_of(request, demand)
    found_LE = lasting_homes(pilot, pilot.demand, [search_near, search_afresh], price)
    if np.array_equal(found_LE, pilot.previous.home_LE) or not clock.allows(0.5):
        return home_LE
    return lasting_homes(request, demand, [search_near, search_afresh], price)


def _searched(
    request: PlacementRequest, demand: ScheduledDemand, clock: Deadline, num_layers: int, *, afresh: bool = False
) -> ndarray:
    """Return searched homes of some layers of a step: after a planned step near its homes, or also afresh."""
    home_LE, afresh = request.previous.home_LE.astype(np.int64), afresh or not request.warm
    return search_homes(request, demand, home_LE, clock, afresh=afresh, share=len(home_LE) / num_layers)


def _cheapest_ways(
    request: PlacementRequest, demand: ScheduledDemand, clock: Deadline
) -> tuple[LayerChoices, LayerChoices]:
    """Return the cheapest of the ways to fill resident slots, with homes that stay or move, and with those that stay.

    Ways are priced on a few layers first; the best ones, and moves that pay there, are tried on all. Where homes move,
    those that stay have nothing in shared slots: their cost is an upper bound.
    """
    previous_LE = request.previous.home_LE.astype(np.int64)
    ways = _rank_ways(pilot_of(request, demand, micro_batches=pilot_micro_batches(demand)), clock)
    kept = chosen = _cheapest_of(request, demand, [(previous_LE, way) for way in _staying(ways)[: ways_tried(demand)]])
    if request.budget.move_homes and clock.allows(0.5):
        options = (_lasting_options if request.warm else _paying_options)(request, demand, ways, clock)
        if options:
            chosen = _move_where_it_pays(request, kept, _cheapest_of(request, demand, options))
    whole = _with_shared_slots(request, demand, chosen, _with_seconds)
    return whole, whole if chosen is kept else kept


def _rank_ways(pilot: PlacementRequest, clock: Deadline) -> list[ResidentWay]:
    """Return the ways to fill resident slots, the cheapest first."""
    previous_LE = pilot.previous.home_LE.astype(np.int64)

    def price(ways: list[ResidentWay]) -> dict[ResidentWay, float]:
        return {way: _total(pilot, _cheapest_of(pilot, pilot.demand, [(previous_LE, way)])) for way in ways}

    found = price([NO_REPLICAS, *first_ways(pilot)])
    if clock.allows(0.3):
        best = min(found, key=found.__getitem__)
        # found beside the best way: where homes may move, staying must not cost more than where they may not
        stay = min((way for way in found if not way.deal_again), key=found.__getitem__)
        others = dict.fromkeys([*variants(pilot, best), *variants(pilot, stay)])
        found |= price([way for way in others if way not in found])
    return sorted(found, key=found.__getitem__)


def _paying_options(
    request: PlacementRequest, demand: ScheduledDemand, ways: list[ResidentWay], clock: Deadline
) -> list[Option]:
    """Return homes, and ways to fill slots, that are cheaper than staying in a few layers.

    ways   cheapest first
    """
    previous_LE = request.previous.home_LE.astype(np.int64)
    pilot = pilot_of(request, demand, micro_batches=pilot_micro_batches(demand))
    pilot_demand, before_LE = pilot.demand, pilot.previous.home_LE.astype(np.int64)
    stay = _total(pilot, _cheapest_of(pilot, pilot_demand, [(before_LE, way) for way in _staying(ways)]))
    pilot_searched_LE = _searched(pilot, pilot_demand, clock, len(previous_LE))
    cost_of: dict[tuple[bool, ResidentWay], float] = {}
    for from_searched, start_LE in ((False, before_LE), (True, pilot_searched_LE)):
        for way in _moving(ways):
            if from_searched or way.deal_again:
                filled = _fill(pilot, pilot_demand, _homes(pilot, pilot_demand, start_LE, way), way)
                cost_of[from_searched, way] = _total(pilot, filled)
    paying = [moved for moved, cost in cost_of.items() if cost < (1 - _WORTH_MOVING) * stay]
    if is_large(demand):
        paying = sorted(paying, key=cost_of.__getitem__)[:1]
    searched_LE = previous_LE
    if any(from_searched for from_searched, _ in paying):
        searched_LE = _searched(request, demand, clock, len(previous_LE))
    return [(searched_LE if from_searched else previous_LE, way) for from_searched, way in paying]


def _lasting_options(
    request: PlacementRequest, demand: ScheduledDemand, ways: list[ResidentWay], clock: Deadline
) -> list[Option]:
    """Return homes that last, and ways to fill slots; none where homes do not last in a few layers."""
    previous_LE = request.previous.home_LE.astype(np.int64)
    staying, moving = _staying(ways)[: ways_tried(demand)], _moving(ways)

    def price(request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray) -> ndarray:
        return _cheapest_of(request, demand, [(home_LE, way) for way in staying]).cost_ML

    def deal(request: PlacementRequest, demand: ScheduledDemand) -> ndarray:
        return _homes(request, demand, request.previous.home_LE.astype(np.int64), moving[-1])

    def search(afresh: bool, request: PlacementRequest, demand: ScheduledDemand) -> ndarray:
        home_LE = _searched(request, demand, clock, len(previous_LE), afresh=afresh)
        return _homes(request, demand, home_LE, moving[-1])

    proposals: list[Propose] = [partial(search, False), partial(search, True)]
    if moving[-1].deal_again:
        proposals.append(deal)
    pilot = pilot_of(request, demand)
    found_LE = lasting_homes(pilot, pilot.demand, proposals, price)
    if np.array_equal(found_LE, pilot.previous.home_LE) or not clock.allows(0.5):
        return []
    home_LE = lasting_homes(request, demand, proposals, price)
    return [(home_LE, way) for way in staying] if (home_LE != previous_LE).any() else []


def _staying(ways: list[ResidentWay]) -> list[ResidentWay]:
    """Return the best ways that leave homes alone."""
    return [way for way in ways if not way.deal_again][:BEST_WAYS]


def _moving(ways: list[ResidentWay]) -> list[ResidentWay]:
    """Return the best way that leaves homes where they were searched, and the best that deals them again, if any."""
    return [*_staying(ways)[:1], *[way for way in ways if way.deal_again][:1]]


def _total(request: PlacementRequest, choices: LayerChoices) -> float:
    return float((choices.cost_L + moving_share_L(request, choices.home_LE)).sum())


def _homes(request: PlacementRequest, demand: ScheduledDemand, start_LE: ndarray, way: ResidentWay) -> ndarray:
    """Return the homes of a way: those given, or dealt again inside nodes."""
    return deal_inside_nodes(request, demand, start_LE, way.traffic_slots) if way.deal_again else start_LE


def _fill(request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, way: ResidentWay) -> LayerChoices:
    return _with_seconds(request, demand, home_LE, fill_resident_slots(request, demand, home_LE, way))


def _cheapest_of(request: PlacementRequest, demand: ScheduledDemand, options: list[Option]) -> LayerChoices:
    """Return for each layer, and each group where homes are the same, the cheapest of some ways from some homes."""
    best: LayerChoices | None = None
    for start_LE, way in options:
        new = _fill(request, demand, _homes(request, demand, start_LE, way), way)
        best = new if best is None else _cheaper(request, demand, best, new)
    assert best is not None, "there is a way"
    return best


def _cheaper(request: PlacementRequest, demand: ScheduledDemand, best: LayerChoices, new: LayerChoices) -> LayerChoices:
    """Return the cheaper one for each layer, moves included; where both have the same homes, for each group as well.

    No replica stays from one group of micro-batches to the next, so groups are chosen one by one.
    """
    best_L, new_L = (one.cost_L + moving_share_L(request, one.home_LE) for one in (best, new))
    same_L = (best.home_LE == new.home_LE).all(axis=1)
    chosen = best.with_layers(new, (new_L < best_L) & ~same_L)
    if demand.group_M is None:
        return chosen.with_layers(new, (new_L < best_L) & same_L)
    in_group_MM = demand.group_M[:, None] == demand.group_M
    cheaper_ML = in_group_MM @ new.cost_ML < in_group_MM @ best.cost_ML
    return chosen.with_replicas(new, cheaper_ML & same_L)


def _with_shared_slots(
    request: PlacementRequest,
    demand: ScheduledDemand,
    chosen: LayerChoices,
    priced: Callable[[PlacementRequest, ScheduledDemand, ndarray, Replicas], LayerChoices],
) -> LayerChoices:
    """Return the choices with further replicas in shared slots, in (micro-batches, layers) where they pay."""
    if request.budget.resident_slots == request.budget.slots:
        return chosen
    budget, best = request.budget, chosen
    tolerances, scopes = {budget.tolerance}, {budget.cross_node_copies}
    if budget.objective == "seconds":  # each shared copy is pushed for each pass: fewer may take less time
        tolerances, scopes = tolerances | {LOOSE}, scopes | {False}
    ways = list(product(sorted(tolerances, reverse=True), sorted(scopes)))

    def fill(
        way: tuple[float, bool], request: PlacementRequest, demand: ScheduledDemand, of: LayerChoices
    ) -> LayerChoices:
        replicas, (tolerance, cross_node) = (of.replica_MLRB, of.quota_MLRB), way
        further = fill_shared_slots(request, demand, of.home_LE, replicas, tolerance=tolerance, cross_node=cross_node)
        return priced(request, demand, of.home_LE, further)

    if is_large(demand):
        pilot = pilot_of(request, demand, micro_batches=pilot_micro_batches(demand))
        pilot_demand = pilot.demand
        part = chosen.of_layers(pilot_layers(chosen.home_LE), micro_batches=len(pilot_demand.tokens_MLRE))
        cost_X = [np.minimum(part.cost_ML, fill(way, pilot, pilot_demand, part).cost_ML).sum() for way in ways]
        worth = min(cost_X) < (1 - _WORTH_SHARING) * part.cost_ML.sum()
        ways = [ways[int(np.argmin(cost_X))]] if worth else []
    for way in ways:
        other = fill(way, request, demand, chosen)
        best = best.with_replicas(other, other.cost_ML < best.cost_ML)
    return best
