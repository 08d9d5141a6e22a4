"""`relibra_paper`: ReLibra's levers as its paper has them, for modelled seconds or for even token-slots.

Homes are annealed over all micro-batches; with `pack_samples`, samples are then fed from ranks near their experts
(their micro-batch stays); replicas stay inside the node, in shared slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.layer_plans import (
    LayerChoice,
    LayerPlans,
    SlotChoice,
    cheapest_layers,
    plan_layers,
    step_seconds,
)
from relibra.planning.loads import home_rank_load, replica_load_change
from relibra.planning.placement import Placement
from relibra.planning.relibra_paper.locality import place_near_experts
from relibra.planning.relibra_paper.step_homes import Objective, search_homes
from relibra.routing.demand import ScheduledDemand

_WORTH_MOVING = 0.01
"""Share of a layer's cost that new homes must save to replace those of a planned step: loads vary."""
_TOLERANCES = (1.0, 10.0)
"""Multiples of the budget's tolerance that are priced for seconds; a plan without replicas is priced too."""


def decide(request: PlacementRequest) -> Placement:
    """Choose homes, schedule and replicas for modelled seconds."""
    return _decide(request, "seconds", cross_node=False)


def decide_tokens(request: PlacementRequest) -> Placement:
    """Choose homes, schedule and replicas for even token-slots, the paper's objective."""
    return _decide(request, "tokens", cross_node=False)


def decide_tokens_across_nodes(request: PlacementRequest) -> Placement:
    """Choose as `decide_tokens` does, with replicas on any node."""
    return _decide(request, "tokens", cross_node=True)


def _decide(request: PlacementRequest, objective: Objective, *, cross_node: bool) -> Placement:
    demand, cluster, budget = request.demand, request.cluster, request.budget
    layers = _plan(request, demand, objective, cross_node=cross_node)
    if budget.pack_samples and cluster.num_nodes > 1:
        placed = place_near_experts(request, demand, layers.home_LE)
        placed_layers = _plan(request, placed, objective, cross_node=cross_node)
        if step_seconds(request, placed, placed_layers) < step_seconds(request, demand, layers):
            demand, layers = placed, placed_layers
    return request.placement(
        layers.home_LE,
        layers.replica_MLRB,
        layers.quota_MLRB,
        scope="cluster" if cross_node else "node",
        schedule=demand,
    )


def _plan(request: PlacementRequest, demand: ScheduledDemand, objective: Objective, *, cross_node: bool) -> LayerPlans:
    """Return homes and replicas under a schedule: homes stay in layers where annealed ones do not pay."""
    budget, slots = request.budget, SlotChoice(number=request.slots, resident=False)
    tolerances = [budget.tolerance] if objective == "tokens" else [None, *(budget.tolerance * x for x in _TOLERANCES)]
    choices = [LayerChoice(tolerance=tolerance, cross_node=cross_node) for tolerance in tolerances]
    previous_LE = request.previous.home_LE.astype(np.int64)

    def place(home_LE: Int64[ndarray, "L E"]) -> LayerPlans:
        plans = {choice: plan_layers(request, demand, slots, choice, home_LE) for choice in choices}
        if objective == "seconds":
            return cheapest_layers(plans, demand, slots, worth_moving=0.0)
        [plan] = plans.values()
        return replace(plan, seconds_ML=_unevenness_ML(request, demand, plan), moves_L=np.zeros(len(home_LE)))

    stay = place(previous_LE)
    if not budget.move_homes:
        return stay
    moved = place(search_homes(request, demand, objective))
    saved_L = (stay.seconds_ML - moved.seconds_ML).sum(axis=0) - moved.moves_L
    return stay.with_layers(moved, saved_L > (_WORTH_MOVING if request.warm else 0.0) * stay.seconds_ML.sum(axis=0))


def _unevenness_ML(request: PlacementRequest, demand: ScheduledDemand, plan: LayerPlans) -> Float64[ndarray, "M L"]:
    """Return the load of the busiest rank / the mean."""
    load_MLR = home_rank_load(demand.load_MLE, plan.home_LE, request.cluster.num_ranks)
    load_MLR = load_MLR + replica_load_change(plan.replica_MLRB, plan.quota_MLRB, plan.home_LE)
    mean_ML, top_ML = load_MLR.mean(axis=2), load_MLR.max(axis=2, initial=0)
    return np.divide(top_ML, mean_ML, out=np.ones_like(mean_ML), where=mean_ML > 0)
