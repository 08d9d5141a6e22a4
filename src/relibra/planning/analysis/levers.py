"""Gain of each lever: the skew of a step as the levers of a plan are applied one after the other."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from relibra.planning.analysis.bounds import reachable_bound
from relibra.planning.levers.replication import replicate
from relibra.planning.loads import home_rank_load, replica_load_change
from relibra.planning.placement import step_skew
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.routing.statistics import contiguous_homes


def lever_gaps(plan: StepPlan, demand: ScheduledDemand) -> list[tuple[str, float]]:
    """Return the skew of the step after each lever, from the static layout down to the bound.

    Cumulative: "static" homes under the given schedule without replicas; the plan's "schedule"; its "homes"; "replicas"
    inside the nodes; "cross-node copies" (the plan itself); the plan's "bound". An unused lever leaves the figure
    unchanged. If a plan has copies across nodes, replicas inside the nodes alone are solved anew per micro-batch.

    demand    with the schedule that the balancer was given
    """
    scheduled = plan.scheduled(demand)
    static_LE = _static_homes(len(plan.layer_ids), plan.num_experts, plan.num_ranks)
    final = plan.skew(scheduled)
    inside = _skew_with_replicas_inside(plan, scheduled) if plan.num_cross_node_copies else final
    return [
        ("static", static_skew(demand, plan.num_ranks)),
        ("schedule", _homes_skew(scheduled, static_LE, plan.num_ranks)),
        ("homes", _homes_skew(scheduled, plan.home_LE, plan.num_ranks)),
        ("replicas", inside),
        ("cross-node copies", final),
        ("bound", plan.bound(scheduled)),
    ]


def static_skew(demand: ScheduledDemand, num_ranks: int) -> float:
    """Return the skew of the step without a plan: experts at their static homes, the schedule as it is."""
    _, L, E = demand.load_MLE.shape
    return _homes_skew(demand, _static_homes(L, E, num_ranks), num_ranks)


def lever_bounds(plan: StepPlan, demand: ScheduledDemand) -> list[tuple[str, float]]:
    """Return the lowest reachable skew after each lever of `lever_gaps` (`reachable_bound`).

    Each has the schedule and homes so far, and the plan's slots and scope. From "homes" on it is the plan's bound,
    because replicas and cross-node copies only approach that.

    demand    with the schedule that the balancer was given
    """
    scheduled = plan.scheduled(demand)
    static_LE = _static_homes(len(plan.layer_ids), plan.num_experts, plan.num_ranks)
    final = plan.bound(scheduled)
    return [
        ("static", _reachable_skew(plan, demand, static_LE)),
        ("schedule", _reachable_skew(plan, scheduled, static_LE)),
        *((lever, final) for lever in ("homes", "replicas", "cross-node copies", "bound")),
    ]


def _static_homes(num_layers: int, num_experts: int, num_ranks: int) -> Int[ndarray, "L E"]:
    return np.tile(contiguous_homes(num_experts, num_ranks), (num_layers, 1))


def _reachable_skew(plan: StepPlan, demand: ScheduledDemand, home_LE: Int[ndarray, "L E"]) -> float:
    load_MLE = demand.load_MLE
    bound_ML = reachable_bound(load_MLE, home_LE, plan.num_ranks, plan.ranks_per_node, plan.slots, plan.scope)
    return step_skew(bound_ML, home_rank_load(load_MLE, home_LE, plan.num_ranks))


def _homes_skew(
    demand: ScheduledDemand, home_LE: Int[ndarray, "L E"], num_ranks: int, change_MLR: ndarray | int = 0
) -> float:
    load_MLR = home_rank_load(demand.load_MLE, home_LE, num_ranks) + change_MLR
    return step_skew(load_MLR.max(axis=-1, initial=0), load_MLR)


def _skew_with_replicas_inside(plan: StepPlan, scheduled: ScheduledDemand) -> float:
    load_MLE, home_LE = scheduled.load_MLE, plan.home_LE
    replica_MLRB, quota_MLRB = np.empty_like(plan.replica_MLRB), np.empty_like(plan.quota_MLRB)
    for layer in range(len(home_LE)):
        replica_MLRB[:, layer], quota_MLRB[:, layer] = replicate(
            np.ascontiguousarray(load_MLE[:, layer]),
            home_LE[layer],
            plan.num_ranks,
            plan.ranks_per_node,
            slots=plan.slots,
        )
    return _homes_skew(scheduled, home_LE, plan.num_ranks, replica_load_change(replica_MLRB, quota_MLRB, home_LE))
