"""`LayerPlans`: homes and replicas of all layers by one `LayerChoice`, and their cost; `cheapest_layers` mixes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.compute import busiest_attention_M
from relibra.planning.costs.copies import relocation_seconds
from relibra.planning.costs.exchange import combine_arrays
from relibra.planning.costs.layer_costs import LayerCosts, layer_costs
from relibra.planning.levers.homes import HomeMoves, deal_inside_nodes, swap_nodes, swap_prices, swap_ranks
from relibra.planning.levers.replication import replicate
from relibra.planning.levers.resident_replicas import keep_replicas
from relibra.planning.loads import tokens_of_domains
from relibra.routing.demand import ScheduledDemand

_SWAP_MICRO_BATCHES = 32
"""Swaps of homes are priced on every k-th micro-batch, k = M // 32: on 32 to 63 of them, or on all if fewer."""


@dataclass(frozen=True, kw_only=True)
class SlotChoice:
    """Slots of a step: how many each rank has, and whether every layer has slots of its own (`Placement.resident`)."""

    number: int
    resident: bool


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """One way to place a layer's experts and replicas.

    homes           which experts move
    traffic_slots   slots for the remote experts that a node (on a single node: a rank) sends most token-slots to. The
                    other slots even out loads
    tolerance       accepted load of the busiest rank above the mean, as a share; None: no replicas
    cross_node      replicas may be on nodes without the expert
    """

    homes: HomeMoves = "stay"
    traffic_slots: int = 0
    tolerance: float | None = None
    cross_node: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlans:
    """Homes and replicas of every layer by one choice, and their seconds.

    seconds_ML   compute, exchange, and those waits for copies that do not depend on other layers; no moves
    queue_ML     waits for pushes of all layers into their slots, which share one queue; priced as if every layer
                 followed this choice
    moves_L      each layer's moves of homes, spread evenly over ranks and the steps that new homes serve
    costs        from which seconds and queues are computed; None: dropped, once mixes are priced
    """

    home_LE: Int64[ndarray, "L E"]
    replica_MLRB: Int16[ndarray, "M L R B"]
    quota_MLRB: Int32[ndarray, "M L R B"]
    seconds_ML: Float64[ndarray, "M L"]
    queue_ML: Float64[ndarray, "M L"]
    moves_L: Float64[ndarray, " L"]
    costs: LayerCosts | None

    @property
    def seconds_L(self) -> Float64[ndarray, " L"]:
        """Return the seconds of each layer where all are planned by one choice, with its part of the moves."""
        return (self.seconds_ML + self.queue_ML).sum(axis=0) + self.moves_L

    def with_replicas(self, other: LayerPlans, chosen_ML: Bool[ndarray, "M L"]) -> LayerPlans:
        """Return these plans with the replicas of others in some micro-batches and layers."""

        def choose(new: ndarray, old: ndarray) -> ndarray:
            return np.where(chosen_ML.reshape(*chosen_ML.shape, *[1] * (new.ndim - 2)), new, old)

        names = ("replica_MLRB", "quota_MLRB", "seconds_ML", "queue_ML", "costs")
        new = {name: combine_arrays(choose, getattr(other, name), getattr(self, name)) for name in names}
        return replace(self, **new)

    def with_layers(self, other: LayerPlans, chosen_L: Bool[ndarray, " L"]) -> LayerPlans:
        """Return these plans with others in some layers."""
        return replace(
            self.with_replicas(other, np.broadcast_to(chosen_L, self.seconds_ML.shape)),
            home_LE=np.where(chosen_L[:, None], other.home_LE, self.home_LE),
            moves_L=np.where(chosen_L, other.moves_L, self.moves_L),
        )


def plan_layers(
    request: PlacementRequest,
    demand: ScheduledDemand,
    slots: SlotChoice,
    choice: LayerChoice,
    home_LE: Int64[ndarray, "L E"] | None = None,
    held_LRB: Int[ndarray, "L R B"] | None = None,
) -> LayerPlans:
    """Return all layers planned and priced by one choice.

    demand    under the schedule that is priced
    home_LE   given homes; None: those of the choice
    held_LRB  experts that stay in the slots over all micro-batches; None: chosen
    """
    home_LE = choose_homes(request, demand, choice) if home_LE is None else home_LE
    replica_MLRB, quota_MLRB = _replicas(request, demand, home_LE, slots, choice, held_LRB)
    placement = request.placement(
        home_LE, replica_MLRB, quota_MLRB, schedule=demand, resident=slots.resident, scope="cluster"
    )
    costs = layer_costs(placement, demand, request.cluster, request.expert)
    costs = replace(costs, resident=slots.resident)  # a choice without replicas may be mixed with one that has some
    attention_M = busiest_attention_M(demand, request.cluster, request.expert)
    copies_ML = costs.exposed_copies_ML(attention_M)
    own_copies_ML = costs.exposed_copies_ML(attention_M, without_queue=slots.resident)
    return LayerPlans(
        home_LE=home_LE,
        replica_MLRB=replica_MLRB,
        quota_MLRB=quota_MLRB,
        seconds_ML=costs.compute_ML + costs.exchange_ML + own_copies_ML,
        queue_ML=copies_ML - own_copies_ML,
        moves_L=_moves_L(request, home_LE),
        costs=costs,
    )


def choose_homes(request: PlacementRequest, demand: ScheduledDemand, choice: LayerChoice) -> Int64[ndarray, "L E"]:
    """Return the home rank of each expert (`HomeMoves`)."""
    before_LE, cluster = request.previous.home_LE.astype(np.int64), request.cluster
    if choice.homes == "stay":
        return before_LE
    load_LE, node_LE = demand.load_MLE.sum(axis=0), before_LE // cluster.ranks_per_node
    every = max(1, len(demand.tokens_MLRE) // _SWAP_MICRO_BATCHES)
    prices = swap_prices(request, demand, cluster.num_nodes, every=every)

    def move(layer: int) -> ndarray:
        load_ME, node_E = np.ascontiguousarray(demand.load_MLE[::every, layer]), node_LE[layer]
        if choice.homes == "by micro-batch":
            return swap_ranks(load_ME, before_LE[layer], cluster.num_ranks, prices)
        if choice.homes == "over nodes":
            source_MNE = tokens_of_domains(demand.tokens_MLRE, layer, cluster.num_nodes, every=every)
            node_E = swap_nodes(load_ME, source_MNE, node_E, prices)
        return deal_inside_nodes(load_LE[layer], node_E, before_LE[layer], cluster.num_ranks, cluster.ranks_per_node)

    return np.stack(parallel_map(move, len(before_LE)))


def _replicas(
    request: PlacementRequest,
    demand: ScheduledDemand,
    home_LE: Int64[ndarray, "L E"],
    slots: SlotChoice,
    choice: LayerChoice,
    held_LRB: Int[ndarray, "L R B"] | None,
) -> tuple[Int16[ndarray, "M L R B"], Int32[ndarray, "M L R B"]]:
    """Return the experts in slots, and the token-slots of each."""
    cluster, load_MLE = request.cluster, demand.load_MLE
    R, G = cluster.num_ranks, cluster.ranks_per_node
    shape = (*demand.tokens_MLRE.shape[:3], slots.number)
    replica_MLRB, quota_MLRB = np.full(shape, -1, dtype=np.int16), np.zeros(shape, dtype=np.int32)
    tolerance = choice.tolerance
    if not slots.number or tolerance is None:
        return replica_MLRB, quota_MLRB
    domains = cluster.num_nodes if cluster.num_nodes > 1 else R

    def fill(layer: int) -> None:
        load_ME, home_E = np.ascontiguousarray(load_MLE[:, layer]), home_LE[layer]
        if slots.resident:
            replica_MRB, quota_MRB = keep_replicas(
                load_ME, home_E, R, G,
                slots=slots.number, tolerance=tolerance, cross_node=choice.cross_node, group_M=demand.group_M,
                source_MXE=tokens_of_domains(demand.tokens_MLRE, layer, domains), traffic_slots=choice.traffic_slots,
                held_RB=None if held_LRB is None else held_LRB[layer],
            )  # fmt: skip
        else:
            replica_MRB, quota_MRB = replicate(
                load_ME, home_E, R, G, slots=slots.number, tolerance=tolerance, cross_node=choice.cross_node
            )
        replica_MLRB[:, layer], quota_MLRB[:, layer] = replica_MRB, quota_MRB

    parallel_map(fill, len(home_LE))
    return replica_MLRB, quota_MLRB


def cheapest_layers(
    plans: Mapping[LayerChoice, LayerPlans], demand: ScheduledDemand, slots: SlotChoice, *, worth_moving: float
) -> LayerPlans:
    """Return each layer with its cheapest homes and, under these, the cheapest replicas of each group of micro-batches.

    Resident slots are empty at the start of each group, shared slots at that of each micro-batch, so each group or
    micro-batch is chosen alone.

    worth_moving   share of a layer's seconds that new homes must save beyond the time of their moves
    """

    def cost_ML(one: LayerPlans) -> ndarray:
        return one.seconds_ML + one.queue_ML

    M = len(demand.load_MLE)
    group_M = np.zeros(M) if demand.group_M is None else demand.group_M
    group_M = group_M if slots.resident else np.arange(M)
    same_MM = (group_M[:, None] == group_M).astype(np.float64)
    by_homes: dict[HomeMoves, LayerPlans] = {}
    for choice, plan in plans.items():
        best = by_homes.setdefault(choice.homes, plan)
        if best is not plan:
            by_homes[choice.homes] = best.with_replicas(plan, same_MM @ cost_ML(plan) < same_MM @ cost_ML(best))
    best = by_homes.pop("stay")
    stay_L = cost_ML(best).sum(axis=0)
    for plan in by_homes.values():
        new_L, best_L = cost_ML(plan).sum(axis=0) + plan.moves_L, cost_ML(best).sum(axis=0) + best.moves_L
        best = best.with_layers(plan, (new_L < best_L) & (new_L < (1 - worth_moving) * stay_L))
    return best


def step_seconds(request: PlacementRequest, demand: ScheduledDemand, layers: LayerPlans) -> float:
    """Return the seconds of a step, with its part of the moves of homes."""
    assert layers.costs is not None, "costs are dropped once mixes are priced"
    costs, homes = layers.costs, request.previous.with_home_ranks(layers.home_LE.astype(np.int16))
    attention_M = busiest_attention_M(demand, request.cluster, request.expert)
    seconds_ML = costs.compute_ML + costs.exchange_ML + costs.exposed_copies_ML(attention_M) + costs.host_ML
    moving = relocation_seconds(request.previous, homes, request.cluster, request.expert)
    attention = 3.0 * len(layers.home_LE) * float(attention_M.sum())
    return float(seconds_ML.sum()) + attention + moving / request.budget.steps_served


def _moves_L(request: PlacementRequest, home_LE: Int64[ndarray, "L E"]) -> Float64[ndarray, " L"]:
    """Return the seconds per step of each layer's moves: those on a single link / number of ranks / `steps_served`."""
    cluster, before_LE = request.cluster, request.previous.home_LE
    node_LE = home_LE // cluster.ranks_per_node
    across_L = (before_LE // cluster.ranks_per_node != node_LE).sum(axis=1)
    inside_L = (before_LE != home_LE).sum(axis=1) - across_L
    seconds_L = across_L / cluster.slowest_bytes_per_second + inside_L / cluster.intra.bytes_per_second
    return seconds_L * request.expert.state_bytes / cluster.num_ranks / request.budget.steps_served
