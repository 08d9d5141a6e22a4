"""Lasting residents: homes and replicas of an earlier step; the coming step only splits its token-slots over them.

Popularity changes slowly, so replicas that suited the last step suit the next one too. Nothing has to be searched
between the end of a rollout and the first micro-batch, and slots are filled again only because an optimizer step
changed the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Int16
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.layer_plans import LayerChoice, SlotChoice, cheapest_layers, plan_layers
from relibra.planning.balancers.relibra import TOLERANCES, layer_choices
from relibra.planning.costs.copies import memory_of_slots
from relibra.planning.placement import Homes, Placement
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True, eq=False)
class Residents(Homes):
    """Homes, and the experts that slots hold in every micro-batch.

    replica_LRB   expert in each slot of its layer; -1: none
    """

    replica_LRB: Int16[ndarray, "L R B"]


def with_residents(homes: Homes, experts: list) -> Homes:
    """Return homes with the experts `[L][R][B]` that slots hold; for another number of ranks, the homes alone."""
    replica_LRB = np.array(experts, dtype=np.int16)
    if replica_LRB.shape[1] != homes.num_ranks:
        return homes
    return Residents(**{field.name: getattr(homes, field.name) for field in fields(Homes)}, replica_LRB=replica_LRB)


def choose_residents(request: PlacementRequest, plan: StepPlan) -> Residents | None:
    """Return the homes of a plan, and for each layer the replicas that serve its whole step at the least seconds.

    None for a plan without resident slots: nothing that lasts fits or pays, and the next step is planned whole.

    Replicas are chosen from the step's totals and priced on its micro-batches, in all of which they stay: slots are
    filled again after an optimizer step only.

    request   of the step that the plan was made for
    """
    if not plan.resident or not plan.slots:
        return None
    demand, home_LE = plan.scheduled(request.demand), plan.home_LE.astype(np.int64)
    slots, totals = SlotChoice(number=plan.slots, resident=True), _totals(demand)
    chosen_LRB = np.full(plan.replica_MLRB.shape[1:], -1, dtype=np.int16)
    best_L = plan_layers(request, demand, slots, LayerChoice(), home_LE).seconds_L
    for choice in _choices(request, slots):
        held_LRB = plan_layers(request, totals, slots, choice, home_LE).replica_MLRB[0]
        seconds_L = plan_layers(request, demand, slots, choice, home_LE, held_LRB).seconds_L
        chosen_LRB = np.where((seconds_L < best_L)[:, None, None], held_LRB, chosen_LRB)
        best_L = np.minimum(seconds_L, best_L)
    return Residents(**{field.name: getattr(plan, field.name) for field in fields(Homes)}, replica_LRB=chosen_LRB)


def _choices(request: PlacementRequest, slots: SlotChoice) -> list[LayerChoice]:
    tolerances = [request.budget.tolerance * share for share in TOLERANCES]
    return [replace(choice, tolerance=t) for choice in layer_choices(request, slots) for t in tolerances]


def _totals(demand: ScheduledDemand) -> ScheduledDemand:
    """Return the demand with all samples in one micro-batch."""
    return replace(
        demand,
        tokens_MLRE=demand.tokens_MLRE.sum(axis=0, keepdims=True, dtype=demand.tokens_MLRE.dtype),
        micro_batch_S=np.minimum(demand.micro_batch_S, 0),
        group_M=None,
    )


def fits(request: PlacementRequest, residents: Residents) -> bool:
    """Return whether the limits of a step allow the slots of residents."""
    (layers, _, slots), most = residents.replica_LRB.shape, request.budget.slots
    fits_memory = memory_of_slots(slots, layers, request.expert) <= request.memory_gib * 2**30
    return fits_memory and (most is None or slots <= most)


def split_over(request: PlacementRequest, residents: Residents) -> Placement:
    """Return the placement of a step under given homes and replicas: the cheapest split of each layer's token-slots."""
    held_LRB, home_LE = residents.replica_LRB, residents.home_LE.astype(np.int64)
    slots = SlotChoice(number=held_LRB.shape[2], resident=True)
    tolerances = [None, *(request.budget.tolerance * share for share in TOLERANCES)]
    choices = [LayerChoice(tolerance=tolerance, cross_node=True) for tolerance in tolerances]
    plans = {one: plan_layers(request, request.demand, slots, one, home_LE, held_LRB) for one in choices}
    layers = cheapest_layers(plans, request.demand, slots, worth_moving=0.0)
    return request.placement(layers.home_LE, layers.replica_MLRB, layers.quota_MLRB, resident=True, scope="cluster")
