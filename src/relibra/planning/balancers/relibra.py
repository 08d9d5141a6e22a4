"""relibra: homes, schedule, replicas and cross-node copies of a step from known routes (after ReLibra and ForeMoE).

ReLibra (arXiv 2605.08639) has no public code. Own parts: chained replication, packing against nodes, cross-node copies
in slots shared by both kinds, the search of the ceiling per (micro-batch, layer), and replicas that stay over
micro-batches (`planning.replicas.resident_replicas`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.homes_and_replicas import choose_homes_and_replicas, replicas_of_homes
from relibra.planning.balancers.layer_choices import LayerChoices
from relibra.planning.balancers.resident_number import with_cheapest_resident_slots
from relibra.planning.balancers.schedules import pack_groups, place_near_experts
from relibra.planning.costs.compute import busiest_attention_seconds
from relibra.planning.home_search.step_homes import search_homes
from relibra.planning.placement import Placement
from relibra.planning.replicas.pricing import all_moves_seconds
from relibra.planning.schedule.limits import ScheduleLimits
from relibra.planning.search.deadline import Deadline
from relibra.routing.demand import ScheduledDemand

_MOST_LAYERS, _SCHEDULE_LAYERS = 32, 12
"""Layers above which the schedule is chosen for some of them, evenly spaced: it is one for all."""
_CLEARLY = 0.97
"""New homes / homes before the step, in cost: below this no schedule is searched for the homes before the step (first
plan only)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
    """A complete choice: demand under its schedule, homes and replicas for it."""

    demand: ScheduledDemand
    layers: LayerChoices


def decide(request: PlacementRequest) -> Placement:
    """Choose homes and replicas, then look for a cheaper schedule for these homes.

    Homes are chosen for the given schedule: they serve later steps too, whose samples are others. If the new homes cost
    more than 0.97 x the old ones, or the plan follows an earlier one, a schedule is also searched for the old ones, and
    the cheaper pair is returned. A deadline limits the search of homes and schedule; replicas are always placed.
    """
    clock = Deadline(request.budget.deadline_seconds)
    request = with_cheapest_resident_slots(request, clock)
    budget, L = request.budget, len(request.demand.layer_ids)
    if budget.objective == "seconds" and budget.pack_samples and request.cluster.num_nodes > 1 and L > _MOST_LAYERS:
        few_layers = request.of_layers(np.unique(np.linspace(0, L - 1, _SCHEDULE_LAYERS).astype(np.int64)))
        schedule = _decide(few_layers, clock, only_schedule=True).demand
        demand = request.demand.with_schedule(
            schedule.micro_batch_S, schedule.rank_S, request.cluster.num_ranks, len(schedule.tokens_MLRE)
        )
        settled = replace(budget, pack_samples=False, place_samples=False)
        chosen = _decide(replace(request, demand=demand, budget=settled), clock)
    else:
        chosen = _decide(request, clock)
    return request.placement(
        chosen.layers.home_LE,
        chosen.layers.replica_MLRB,
        chosen.layers.quota_MLRB,
        resident_slots=request.budget.resident_slots or 0,
        scope="cluster" if request.budget.cross_node_copies else "node",
        schedule=chosen.demand,
        cut_short=clock.missed,
    )


def _decide(request: PlacementRequest, clock: Deadline, *, only_schedule: bool = False) -> _Choice:
    """Return the cheapest schedule, homes and replicas found.

    only_schedule   the caller uses the schedule alone
    """
    previous_LE = request.previous.home_LE.astype(np.int64)
    layers, stay = choose_homes_and_replicas(request, request.demand, clock)
    given = _Choice(demand=request.demand, layers=layers)
    chosen = _with_better_schedule(request, given, clock, only_schedule=only_schedule)
    # `stay` may lack replicas in shared slots, so this cost is an upper bound: they are filled with its own schedule
    kept = _Choice(demand=request.demand, layers=stay)
    saves_much = not request.warm and _cost(request, given) < _CLEARLY * _cost(request, kept)
    if not np.array_equal(layers.home_LE, previous_LE) and not saves_much:
        stays = _with_better_schedule(request, kept, clock, only_schedule=only_schedule)
        chosen = min(chosen, stays, key=lambda one: _cost(request, one))
    return chosen


def _with_better_schedule(
    request: PlacementRequest, chosen: _Choice, clock: Deadline, *, only_schedule: bool
) -> _Choice:
    """Return the choice with samples in other micro-batches, or only near their experts, whichever is cheapest.

    only_schedule   the caller takes the schedule and chooses homes again; so homes are not chosen again here if packing
                    is already cheaper with the given homes
    """
    budget, demand, home_LE = request.budget, request.demand, chosen.layers.home_LE
    limits = ScheduleLimits.of_demand(demand, rank_tokens=budget.rank_tokens, token_slack=budget.token_slack)

    def near_experts(demand: ScheduledDemand, home_LE: ndarray) -> ScheduledDemand:
        may_place = budget.place_samples and clock.allows(0.7)
        return place_near_experts(request, demand, home_LE, limits) if may_place else demand

    def settle(demand: ScheduledDemand, home_LE: ndarray) -> _Choice:
        return _Choice(demand=demand, layers=replicas_of_homes(request, demand, home_LE, clock))

    if budget.pack_samples and request.cluster.num_nodes > 1 and clock.allows(0.5):
        packed_demand, packed_LE = _pack(request, home_LE, limits, clock)
        packed_demand = near_experts(packed_demand, packed_LE)
        packed = settle(packed_demand, packed_LE)
        accepted = _cost(request, chosen) / (1 + (budget.tolerance if budget.objective == "tokens" else 0))
        first = budget.objective == "seconds" and budget.move_homes and not request.warm
        settled = only_schedule and _cost(request, packed) < accepted
        if first and not settled and clock.allows(0.5):
            # the first homes may follow the schedule: those of later steps stay where these do
            again = _Choice(demand=packed_demand, layers=choose_homes_and_replicas(request, packed_demand, clock)[0])
            packed = min(packed, again, key=lambda one: _cost(request, one))
        if _cost(request, packed) < accepted:
            chosen = packed
    placed_demand = near_experts(demand, home_LE)
    if placed_demand is demand:
        return chosen
    return min(settle(placed_demand, home_LE), chosen, key=lambda one: _cost(request, one))


def _pack(
    request: PlacementRequest, home_LE: ndarray, limits: ScheduleLimits, clock: Deadline
) -> tuple[ScheduledDemand, ndarray]:
    """Pack samples into micro-batches for homes. For even loads alone, the first homes follow the schedule in turn."""
    budget = request.budget
    packed = pack_groups(request, request.demand, home_LE, limits, seed=budget.seed)
    if budget.objective == "tokens" and budget.move_homes and not request.warm:
        home_LE = search_homes(request, packed, home_LE, clock, afresh=False)
        if clock.allows(0.5):
            packed = pack_groups(request, packed, home_LE, limits, seed=budget.seed + 1)
            home_LE = search_homes(request, packed, home_LE, clock, afresh=False)
    return packed, home_LE


def _cost(request: PlacementRequest, choice: _Choice) -> float:
    """Return the objective of a choice: seconds of the step with its part of the moves, or tokens of busiest ranks."""
    layers = choice.layers
    if request.budget.objective == "tokens":
        placement = request.placement(layers.home_LE, layers.replica_MLRB, layers.quota_MLRB, schedule=choice.demand)
        return float(placement.rank_load(choice.demand).max(axis=2, initial=0).sum())
    moving = all_moves_seconds(request, layers.home_LE) / request.budget.steps_served
    attention = busiest_attention_seconds(choice.demand, request.cluster, request.expert)
    return float(layers.cost_ML.sum()) + attention + moving
