"""relibra: the cheapest plan of a step under the cost model. `decide` is the decision, read from top to bottom.

Known routes say what every rank computes and sends in the coming step, so plans are priced before it runs, and the
cheapest is kept:

once per step    samples stay in their micro-batches, or are packed (`levers/packing.py`);
                 the number of slots, and whether every layer has slots of its own (`SlotChoice`)
for each layer   homes stay or move (`levers/homes.py`); slots for traffic: none, half, all; the accepted
                 unevenness; replicas inside nodes or anywhere (`LayerChoice`)

Choices are priced on some layers and micro-batches; those that win there are planned for all. `Placement.considered`
keeps what was tried and what each would cost. The objective is after ReLibra (arXiv 2605.08639) and ForeMoE
(arXiv 2606.11867).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.layer_plans import (
    LayerChoice,
    LayerPlans,
    SlotChoice,
    cheapest_layers,
    plan_layers,
    step_seconds,
)
from relibra.planning.costs.copies import memory_of_slots
from relibra.planning.levers.homes import HomeMoves
from relibra.planning.levers.packing import pack_groups
from relibra.planning.placement import Considered, ConsideredLayers, Placement
from relibra.routing.demand import ScheduledDemand

SHARED_NUMBERS, RESIDENT_NUMBERS = (1, 2), (1, 2, 4, 8, 16, 32, 64)
"""Numbers of slots that are tried. They do not depend on the limit, so a larger limit only adds choices."""
_WORTH_SLOTS = 0.001
"""Share of the seconds that more slots must save: they take memory."""
_NEARLY_CHEAPEST = 0.08
"""Numbers of slots up to this share dearer than the cheapest are priced with packed samples too."""
_FINALS_UP_TO, _MOST_FINALISTS, _NEAR_BEST = 4_000, 3, 0.015
"""Largest step (layers x micro-batches) with all layers planned for several numbers of slots; how many; how near."""
TOLERANCES = (1, 5, 20)
"""Accepted unevenness that is tried, as multiples of the budget's tolerance."""
_WORTH_MOVING_AGAIN = 0.05
"""Share of a layer's seconds that new homes must save to replace planned ones: the next step has other samples."""
_PROBE_LAYERS, _PROBE_MICRO_BATCHES, _PACKED_LAYERS = 6, 32, 12
_LARGE_STEP = 1024
"""Layers x micro-batches above which probes have half as many micro-batches."""
_ALL_LAYERS_BUDGET = 20_000
"""Layers x micro-batches x choices that are priced on all layers; 2 to 20 choices."""


def decide(request: PlacementRequest) -> Placement:
    """Return the cheapest placement found: slots are priced on a probe, then with each schedule, then on all layers."""
    probe = probe_of(request)
    tried = [_try_slots(probe, slots) for slots in slot_choices(request)]
    least = min(one.seconds for one in tried)
    M, L, _ = request.demand.load_MLE.shape
    most = int(np.clip(_ALL_LAYERS_BUDGET // max(1, M * L), 2, 20))

    schedules = {"kept": request.demand}
    if request.budget.pack_samples and request.cluster.num_nodes > 1:
        schedules["packed"] = _pack(request)
    priced = {
        one: {name: _seconds_of_schedule(request, probe, demand, one, most) for name, demand in schedules.items()}
        for one in tried
        if one.seconds <= (1 + _NEARLY_CHEAPEST) * least
    }
    source_of: dict[_Tried, tuple[_Tried, str]] = {}
    for one in _finalists(request, {one: min(seconds.values()) for one, seconds in priced.items()}):
        name = min(priced[one], key=priced[one].__getitem__)
        whole, demand = one, schedules[name]
        if demand is not probe.demand:  # else the probe is the whole step
            whole = _mix(request, demand, one.slots, _plan_all(request, demand, one.slots, one.winners(most)))
        source_of[whole] = one, name
    best = _cheapest({whole: whole.seconds for whole in source_of})
    on_probe, schedule = source_of[best]
    return request.placement(
        best.cheapest.home_LE,
        best.cheapest.replica_MLRB,
        best.cheapest.quota_MLRB,
        schedule=schedules[schedule],
        resident=best.slots.resident,
        scope="cluster",
        considered=_considered(request, tried, on_probe, schedule, priced[on_probe]),
        considered_layers=_considered_layers(best.plans, best.cheapest),
    )


def slot_choices(request: PlacementRequest) -> list[SlotChoice]:
    """Return the numbers of slots that are tried: none, shared ones, and resident ones as far as memory allows."""
    elsewhere = request.previous.num_experts - request.previous.num_experts // request.cluster.num_ranks
    most = elsewhere if request.budget.slots is None else min(elsewhere, request.budget.slots)
    choices = [SlotChoice(number=0, resident=False)]
    choices += [SlotChoice(number=number, resident=False) for number in SHARED_NUMBERS]
    choices += [SlotChoice(number=number, resident=True) for number in RESIDENT_NUMBERS]
    return [
        slots
        for slots in choices
        if slots.number <= most and (not slots.resident or _gib(request, slots) <= request.memory_gib)
    ]


def layer_choices(request: PlacementRequest, slots: SlotChoice) -> list[LayerChoice]:
    """Return the choices of a layer that are tried first: with the middle tolerance, homes stay."""
    several, tolerance = request.cluster.num_nodes > 1, request.budget.tolerance * TOLERANCES[1]
    if not slots.number:
        return []
    choices = [LayerChoice(tolerance=tolerance, cross_node=cross) for cross in ((False, True) if several else (False,))]
    if slots.resident:
        numbers = sorted({max(1, slots.number // 2), slots.number})
        choices += [LayerChoice(tolerance=tolerance, cross_node=several, traffic_slots=number) for number in numbers]
    return choices


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tried:
    """One choice of slots, with the cheapest choices of its layers: on the probe, or for all layers."""

    slots: SlotChoice
    plans: dict[LayerChoice, LayerPlans]
    cheapest: LayerPlans
    seconds: float

    def winners(self, most: int) -> list[LayerChoice]:
        """Return the layer choices that are the cheapest most often, and one that leaves homes alone; all, if few."""
        if len(self.plans) <= most:
            return list(self.plans)
        wins = {choice: int(follows_ML.sum()) for choice, follows_ML in _followed(self.plans, self.cheapest).items()}
        chosen = sorted((choice for choice in wins if wins[choice]), key=lambda choice: -wins[choice])[:most]
        if not any(choice.homes == "stay" for choice in chosen):
            stay = {choice: plan.seconds_L.sum() for choice, plan in self.plans.items() if choice.homes == "stay"}
            chosen.append(min(stay, key=stay.__getitem__))
        return chosen


def _followed(plans: dict[LayerChoice, LayerPlans], layers: LayerPlans) -> dict[LayerChoice, Bool[ndarray, "M L"]]:
    """Return where the combination `layers` has the plan of each choice; of several equal plans, of the first."""
    left_ML, found = np.ones(layers.seconds_ML.shape, dtype=bool), {}
    for choice, plan in plans.items():
        same_ML = (plan.replica_MLRB == layers.replica_MLRB).all(axis=(2, 3))
        same_ML &= (plan.quota_MLRB == layers.quota_MLRB).all(axis=(2, 3))
        found[choice] = left_ML & same_ML & (plan.home_LE == layers.home_LE).all(axis=1)
        left_ML = left_ML & ~found[choice]
    return found


def _try_slots(probe: PlacementRequest, slots: SlotChoice) -> _Tried:
    """Price choices of the layers, one property after another: traffic, then tolerance, then homes."""
    plans, demand = dict[LayerChoice, LayerPlans](), probe.demand

    def add(choices: Iterable[LayerChoice]) -> None:
        plans.update(_plan_all(probe, demand, slots, [choice for choice in choices if choice not in plans]))

    def best_two() -> list[LayerChoice]:
        cost = {choice: float(plan.seconds_L.sum()) for choice, plan in plans.items() if choice.tolerance is not None}
        return sorted(cost, key=cost.__getitem__)[:2]

    add([LayerChoice(), *layer_choices(probe, slots)])
    tolerances = [probe.budget.tolerance * share for share in TOLERANCES]
    add(replace(choice, tolerance=tolerance) for choice in best_two() for tolerance in tolerances)
    if probe.budget.move_homes:
        homes: tuple[HomeMoves, ...] = ("in nodes", "over nodes" if probe.cluster.num_nodes > 1 else "by micro-batch")
        add(replace(choice, homes=name) for choice in [*best_two(), LayerChoice()] for name in homes)
    return _mix(probe, demand, slots, plans)


def _plan_all(
    request: PlacementRequest, demand: ScheduledDemand, slots: SlotChoice, choices: Sequence[LayerChoice]
) -> dict[LayerChoice, LayerPlans]:
    """Return the layers planned by each choice, several at once."""
    plans = parallel_map(lambda number: plan_layers(request, demand, slots, choices[number]), len(choices))
    return dict(zip(choices, plans, strict=True))


def _finalists(request: PlacementRequest, seconds: dict[_Tried, float]) -> list[_Tried]:
    """Return the choices that are planned for all layers: nearly the cheapest ones; in a large step one."""
    if len(request.demand.layer_ids) * len(request.demand.tokens_MLRE) > _FINALS_UP_TO:
        return [_cheapest(seconds)]
    rising = sorted(seconds.values())
    return [one for one in seconds if seconds[one] <= min((1 + _NEAR_BEST) * rising[0], rising[:_MOST_FINALISTS][-1])]


def _mix(
    request: PlacementRequest, demand: ScheduledDemand, slots: SlotChoice, plans: dict[LayerChoice, LayerPlans]
) -> _Tried:
    """Return the cheapest combination of layer choices found.

    Where homes move, the mix without moves is priced too: layers count moves of a mean rank, the step those of the
    busiest.
    """
    mixes = [cheapest_layers(plans, demand, slots, worth_moving=_WORTH_MOVING_AGAIN if request.warm else 0.0)]
    if mixes[0].moves_L.any():
        stay = {choice: plan for choice, plan in plans.items() if choice.homes == "stay"}
        mixes.append(cheapest_layers(stay, demand, slots, worth_moving=0.0))
    seconds = [step_seconds(request, demand, mix) for mix in mixes]
    best = int(np.argmin(seconds))
    plans = {choice: replace(plan, costs=None) for choice, plan in plans.items()}  # costs are as large as all the rest
    return _Tried(slots=slots, plans=plans, cheapest=replace(mixes[best], costs=None), seconds=seconds[best])


def _cheapest(seconds: dict[_Tried, float]) -> _Tried:
    """Return the cheapest choice; one with more slots only where it is clearly cheaper than those before it."""
    best, *others = seconds
    for choice in others:
        if seconds[choice] < (1 - _WORTH_SLOTS) * seconds[best]:
            best = choice
    return best


def _pack(request: PlacementRequest) -> ScheduledDemand:
    """Return the demand with samples packed for the homes before the step; a few layers decide."""
    layers = _some_layers(request, _PACKED_LAYERS)
    few = request.of_layers(layers)
    packed = pack_groups(few, few.demand, few.previous.home_LE)
    return request.demand.with_schedule(
        packed.micro_batch_S, packed.rank_S, request.cluster.num_ranks, len(request.demand.tokens_MLRE)
    )


def _seconds_of_schedule(
    request: PlacementRequest, probe: PlacementRequest, demand: ScheduledDemand, tried: _Tried, most: int
) -> float:
    """Return the seconds of a few layers under a schedule, scaled to all layers of the step."""
    if demand is probe.demand:
        return tried.seconds
    layers, slots = _some_layers(request, _PROBE_LAYERS), tried.slots
    few = replace(request, demand=demand).of_layers(layers)
    plans = _plan_all(few, few.demand, slots, tried.winners(most))
    return _mix(few, few.demand, slots, plans).seconds * len(request.demand.layer_ids) / len(layers)


def probe_of(request: PlacementRequest) -> PlacementRequest:
    """Return the request for a few layers, evenly spaced, and first micro-batches, up to a border of `group_M` if near.

    `steps_served` is multiplied by all micro-batches / kept ones, so that the kept ones pay their share of the moves. A
    small step is its own probe.
    """
    demand, served = request.demand, request.budget.steps_served
    M, L = demand.tokens_MLRE.shape[:2]
    if L <= _PROBE_LAYERS and M <= _PROBE_MICRO_BATCHES:
        return request
    number = _PROBE_MICRO_BATCHES // (2 if M * L > _LARGE_STEP else 1)
    if number < M:
        group_M = np.zeros(M, dtype=np.int32) if demand.group_M is None else demand.group_M
        end_of_group = int(np.searchsorted(group_M, group_M[number - 1], side="right"))
        number = end_of_group if end_of_group <= 2 * number else number
        demand, served = demand.of_micro_batches(slice(number)), round(served * M / number)
    few = replace(request, demand=demand, budget=replace(request.budget, steps_served=served))
    return few.of_layers(_some_layers(request, _PROBE_LAYERS))


def _some_layers(request: PlacementRequest, number: int) -> Int64[ndarray, " l"]:
    """Return at most `number` layers, evenly spaced, as positions on the layer axis."""
    return np.unique(np.linspace(0, len(request.demand.layer_ids) - 1, number).astype(np.int64))


def _gib(request: PlacementRequest, slots: SlotChoice) -> float:
    layers = len(request.demand.layer_ids)
    return memory_of_slots(slots.number, layers if slots.resident else 1, request.expert) / 2**30


def _considered(
    request: PlacementRequest, tried: list[_Tried], best: _Tried, schedule: str, seconds: dict[str, float]
) -> tuple[Considered, ...]:
    """Return what was tried for the step, in seconds of the whole step: estimates from the probe.

    Scaled by the best choice's seconds of all micro-batches, with the schedule kept / its seconds on the probe.
    """
    scale = seconds["kept"] / best.seconds if best.seconds else 1.0
    rows = [
        Considered(
            schedule="kept",
            slots=choice.slots.number,
            resident=choice.slots.resident,
            memory_gib=_gib(request, choice.slots),
            seconds=choice.seconds * scale,
            chosen=choice is best and schedule == "kept",
        )
        for choice in tried
    ]
    if "packed" in seconds:
        chosen = next(row for row, choice in zip(rows, tried, strict=True) if choice is best)
        rows.append(replace(chosen, schedule="packed", seconds=seconds["packed"], chosen=schedule == "packed"))
    return tuple(rows)


def _considered_layers(plans: dict[LayerChoice, LayerPlans], layers: LayerPlans) -> tuple[ConsideredLayers, ...]:
    follows = _followed(plans, layers)
    return tuple(
        ConsideredLayers(
            **asdict(choice),
            seconds_L=tuple(plan.seconds_L.tolist()),
            micro_batches_L=tuple(follows[choice].sum(axis=0).tolist()),
        )
        for choice, plan in plans.items()
    )
