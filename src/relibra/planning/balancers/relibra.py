"""relibra: homes, schedule, replicas and cross-node copies of a step from known routes (after ReLibra and ForeMoE).

ReLibra (arXiv 2605.08639) has no public code. Own parts: chained replication, packing against nodes, cross-node copies
in slots shared by both kinds, the search of the ceiling per (micro-batch, layer), and replicas that stay over
micro-batches (`planning.replicas.resident_replicas`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.homes_and_replicas import LayerChoices, choose_homes_and_replicas
from relibra.planning.balancers.schedules import pack_groups, place_near_experts
from relibra.planning.costs.compute import busiest_attention_seconds
from relibra.planning.home_search.step_homes import search_homes
from relibra.planning.placement import Placement
from relibra.planning.replicas.pricing import moving_seconds
from relibra.planning.schedule.limits import ScheduleLimits
from relibra.planning.search.deadline import Deadline
from relibra.routing.demand import ScheduledDemand

_PACKING_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
    """A complete choice: demand under its schedule, homes and replicas for it."""

    demand: ScheduledDemand
    layers: LayerChoices


def decide(request: PlacementRequest) -> Placement:
    """Choose homes, then replicas; with packing also schedule, homes and replicas for it, and return the cheaper plan.

    A deadline limits the search of homes and schedule; replicas are always placed.
    """
    budget, demand = request.budget, request.demand
    clock = Deadline(budget.deadline_seconds)
    limits = ScheduleLimits.of_demand(demand, rank_tokens=budget.rank_tokens, token_slack=budget.token_slack)
    may_pack = budget.pack_samples and request.cluster.num_nodes > 1
    home_LE = request.previous.home_LE.astype(np.int64)
    if budget.move_homes and (may_pack or not budget.resident_slots):
        home_LE = search_homes(request, demand, home_LE, clock, first=not request.warm)
    chosen = _choose(request, demand, home_LE, limits, clock)
    if may_pack and clock.allows(0.5):
        packed = _choose(request, *_pack(request, home_LE, limits, clock), limits, clock)
        accepted = 1 + (budget.tolerance if budget.objective == "tokens" else 0)
        if _cost(request, packed) * accepted < _cost(request, chosen):
            chosen = packed
    return request.placement(
        chosen.layers.home_LE,
        chosen.layers.replica_MLRB,
        chosen.layers.quota_MLRB,
        resident_slots=budget.resident_slots or 0,
        scope="cluster" if budget.cross_node_copies else "node",
        schedule=chosen.demand,
        cut_short=clock.missed,
    )


def _choose(
    request: PlacementRequest, demand: ScheduledDemand, home_LE: ndarray, limits: ScheduleLimits, clock: Deadline
) -> _Choice:
    """Place samples near their experts where that saves time, then choose replicas, and homes that pay for moves."""
    if request.budget.place_samples and clock.allows(0.7):
        demand = place_near_experts(request, demand, home_LE, limits)
    return _Choice(demand=demand, layers=choose_homes_and_replicas(request, demand, home_LE, clock))


def _pack(
    request: PlacementRequest, home_LE: ndarray, limits: ScheduleLimits, clock: Deadline
) -> tuple[ScheduledDemand, ndarray]:
    """Pack samples into micro-batches and search homes for them, alternating."""
    demand = request.demand
    for round_number in range(_PACKING_ROUNDS):
        if round_number and not clock.allows(0.5):
            break
        demand = pack_groups(request, demand, home_LE, limits, seed=request.budget.seed + round_number)
        if request.budget.move_homes:
            home_LE = search_homes(request, demand, home_LE, clock, first=False)
    return demand, home_LE


def _cost(request: PlacementRequest, choice: _Choice) -> float:
    """Return the objective of a choice: seconds of the step with its part of the moves, or tokens of busiest ranks."""
    layers = choice.layers
    if request.budget.objective == "tokens":
        placement = request.placement(layers.home_LE, layers.replica_MLRB, layers.quota_MLRB, schedule=choice.demand)
        return float(placement.rank_load(choice.demand).max(axis=2, initial=0).sum())
    moving = moving_seconds(request, layers.home_LE) / request.budget.steps_served
    attention = busiest_attention_seconds(choice.demand, request.cluster, request.expert)
    return float(layers.cost_ML.sum()) + attention + moving
