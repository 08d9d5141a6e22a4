"""`plan_step`: run a balancer, check and price its placement, and return it, or bare homes where these are cheaper."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import PlanError
from relibra.planning.analysis.bounds import reachable_bound
from relibra.planning.balancer import Balancer, PlacementRequest
from relibra.planning.balancers import lasting
from relibra.planning.balancers.lasting import Residents, split_over
from relibra.planning.budget import DEFAULT_MODEL, Budget
from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape
from relibra.planning.costs.prediction import predict
from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.placement import Homes, Placement, static_homes
from relibra.planning.plan import StepPlan
from relibra.planning.registry import BALANCERS, find_balancer
from relibra.planning.validation import validate_plan
from relibra.routing.demand import ScheduledDemand
from relibra.user_function import user_errors

_STATE_BYTES = 18
"""Bytes per parameter of an expert at home: bf16 weight 2, fp32 master 4, two moments 8, gradient sum 4."""
LASTING = "lasting residents"
"""Name of the balancer in a plan over lasting residents."""
_WORTH_PLANNING = 0.05
"""Share of the seconds of a plan over residents that planning the whole step must save."""
_FOR_SLOTS = 0.5
"""Share of the memory left by experts at home that slots may take where the rest of the model is not known."""


def plan_step(
    demand: ScheduledDemand,
    cluster: Cluster,
    budget: Budget | None = None,
    balancer: str = "relibra",
    *,
    expert: ExpertShape | None = None,
    previous: Homes | None = None,
    history_MLE: Int[ndarray, "H L E"] | None = None,
    residents: Residents | None = None,
    never_worse: bool = True,
) -> StepPlan:
    """Plan one step: homes, schedule, replicas and quotas.

    The plan's predicted seconds, with 1 / `steps_served` of the moves, are at most those of the homes before the step
    without replicas and, where experts may move, of the static layout. `StepPlan.balancer` names what was returned.

    demand        token-slots under a schedule (`Demand.with_schedule`) over as many ranks as the cluster has; samples
                  of a piece (`Demand.piece_S`) keep together
    balancer      a name of `BALANCERS`, or a function of the user as `module:function`
    expert        sizes of one expert; None: those of Qwen3-30B-A3B, and `StepPlan.assumed_model` names it
    previous      current homes, for example the plan of the last step; None: the static layout
    history_MLE   loads of earlier micro-batches, for balancers that see "history"; None: they plan from even loads
    residents     current homes, and replicas chosen from an earlier step (`choose_residents`): only token-slots are
                  split, unless the replicas exceed slots or memory of the budget, or the balancer is not "relibra"
    never_worse   False, to compare balancers: return the balancer's plan even if homes without replicas are cheaper, as
                  always for a balancer that evens token-slots out (`Balancer.for_tokens`)
    raises        PlanError when sizes of demand, cluster and budget disagree
    """
    budget, previous, given_demand = budget or Budget(), residents or previous, demand
    _check(demand, cluster, budget, previous, history_MLE)
    entry, start = find_balancer(balancer), time.perf_counter()
    demand, place_S = (demand, slice(None)) if demand.piece_S is None else demand.merged(demand.piece_S)
    request = _request(demand, cluster, budget, expert or EXPERT_SHAPES[DEFAULT_MODEL], previous, history_MLE, entry)
    with user_errors(f"balancer {balancer!r} (request -> Placement)", PlanError) if ":" in balancer else nullcontext():
        if residents is None or balancer != "relibra" or not lasting.fits(request, residents):
            plan = _finished_plan(balancer, entry.decide(request), request)
        else:
            plan = _finished_plan(LASTING, split_over(request, residents), request)
    if never_worse and balancer != "static" and not entry.for_tokens:
        plan = _plan_or_bare_homes(plan, request)
    plan = replace(plan, micro_batch_S=plan.micro_batch_S[place_S], rank_S=plan.rank_S[place_S])
    seconds = time.perf_counter() - start
    assumed = "" if expert else DEFAULT_MODEL
    return replace(plan, demand_digest=given_demand.digest(), plan_seconds=seconds, assumed_model=assumed)


def choose_residents(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, budget: Budget, *, expert: ExpertShape
) -> Residents | None:
    """Return replicas for later steps, chosen from the step of a plan, under its homes; for `plan_step(residents=...)`.

    None for a plan without resident slots, and where replicas that lasted no longer suit: the step planned whole would
    take clearly less.

    demand   that the plan was made for
    """
    request = _request(demand, cluster, budget, expert, plan, None, BALANCERS["relibra"])
    if plan.balancer == LASTING:
        whole = plan_step(demand, cluster, budget, expert=expert, previous=plan)
        if _seconds(whole.predicted, request) < (1 - _WORTH_PLANNING) * _seconds(plan.predicted, request):
            return None
    return lasting.choose_residents(request, plan)


def memory_beside_experts(demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape) -> float:
    """Return the GiB of a rank that slots may take where only its experts are known.

    That is half of the device memory that the experts at home in all layers of the demand leave, with their fp32
    masters, moments and gradient sums. `simulation.memory.memory_for_slots` knows the whole model.
    """
    at_home = demand.num_experts // cluster.num_ranks * len(demand.layer_ids)
    return max(0.0, _FOR_SLOTS * (cluster.memory_bytes - at_home * expert.parameters * _STATE_BYTES)) / 2**30


def _plan_or_bare_homes(plan: StepPlan, request: PlacementRequest) -> StepPlan:
    """Return the plan, or the homes before the step or the static layout without replicas, where these are cheaper."""
    demand, budget, previous = request.demand, request.budget, request.previous
    static = static_homes(request.cluster.topology, demand.layer_ids, demand.num_experts)
    previous_is_static = np.array_equal(static.physical_to_logical_map, previous.physical_to_logical_map)
    bare_homes = {"static" if previous_is_static else "homes kept": previous}
    if budget.move_homes and not previous_is_static:
        bare_homes["static"] = static
    best, least = plan, _seconds(plan.predicted, request)
    for name, homes in bare_homes.items():
        placement = request.placement(homes.home_LE, *request.empty_slots())
        bare = StepPlan.of_placement(placement, previous, np.zeros(demand.load_MLE.shape[:2], np.int64), balancer=name)
        found = predict(bare, demand, request.cluster, request.expert).as_dict()
        if _seconds(found, request) < least:
            finished = _finished_plan(f"{name} (instead of {plan.balancer})", placement, request)
            considered = tuple(replace(row, chosen=False) for row in plan.considered)
            layers = tuple(
                replace(row, micro_batches_L=(0,) * len(row.micro_batches_L)) for row in plan.considered_layers
            )
            finished = replace(finished, considered=considered, considered_layers=layers)
            best, least = finished, _seconds(found, request)
    return best


def _check(
    demand: ScheduledDemand, cluster: Cluster, budget: Budget, previous: Homes | None, history_MLE: ndarray | None
) -> None:
    for value, kind in ((demand, ScheduledDemand), (cluster, Cluster), (budget, Budget)):
        if not isinstance(value, kind):
            raise PlanError(
                f"a {type(value).__name__} in place of a {kind.__name__}: plan_step takes a demand with a schedule "
                "(Demand.with_schedule), a cluster (cluster_preset, read_cluster) and a Budget(...)"
            )
    if demand.tokens_MLRE.shape[2] != cluster.num_ranks:
        raise PlanError(
            f"the demand is scheduled on {demand.tokens_MLRE.shape[2]} ranks, cluster {cluster.name!r} has "
            f"{cluster.num_ranks}: use cluster.with_ranks, or schedule again"
        )
    if demand.num_experts % cluster.num_ranks:
        raise PlanError(
            f"{demand.num_experts} experts cannot be divided evenly among {cluster.num_ranks} ranks: choose a number "
            f"of ranks that divides {demand.num_experts}"
        )
    if demand.num_experts > 1 << 15 or cluster.num_ranks > 1 << 15:
        raise PlanError(f"{demand.num_experts} experts on {cluster.num_ranks} ranks: at most {1 << 15} of each")
    if 0 in demand.counts_SLE.shape[1:]:
        raise PlanError(f"a demand of (samples, layers, experts) {demand.counts_SLE.shape} is empty")
    if budget.rank_tokens is not None and not demand.top_k:
        raise PlanError("a limit of tokens per rank needs the choices per token: give the demand a top_k")
    if previous is not None:
        _check_previous(demand, cluster, previous)
    if history_MLE is not None and (history_MLE.shape[1:] != demand.counts_SLE.shape[1:] or (history_MLE < 0).any()):
        raise PlanError(
            f"the history has shape {history_MLE.shape} or negative loads: it must be (micro-batches, layers, experts) "
            f"with layers and experts {demand.counts_SLE.shape[1:]} of the demand"
        )


def _check_previous(demand: ScheduledDemand, cluster: Cluster, previous: Homes) -> None:
    """Raise PlanError when the previous homes have other ranks, layers or experts."""
    sizes = (previous.num_nodes, previous.ranks_per_node, previous.num_experts, previous.layer_ids.tolist())
    step_sizes = (cluster.num_nodes, cluster.ranks_per_node, demand.num_experts, demand.layer_ids.tolist())
    for what, before, now in zip(("nodes", "ranks per node", "experts", "layers"), sizes, step_sizes, strict=True):
        if before != now:
            raise PlanError(
                f"the previous plan has {what} {before}, this step {now}: leave it out (after a change of ranks, load "
                "the experts from a checkpoint into the static layout first)"
            )


def _request(
    demand: ScheduledDemand,
    cluster: Cluster,
    budget: Budget,
    expert: ExpertShape,
    previous: Homes | None,
    history_MLE: ndarray | None,
    entry: Balancer,
) -> PlacementRequest:
    """Return the input of a balancer, with the loads that it sees."""
    total_LE = np.ones(demand.counts_SLE.shape[1:])
    if entry.sees in ("step totals", "micro-batches"):
        total_LE = demand.load_MLE.sum(axis=0).astype(np.float64)
    elif entry.sees == "history" and history_MLE is not None and len(history_MLE):
        total_LE = history_MLE.sum(axis=0).astype(np.float64)
    memory_gib = memory_beside_experts(demand, cluster, expert) if budget.memory_gib is None else budget.memory_gib
    return PlacementRequest(
        demand=demand,
        cluster=cluster,
        budget=budget,
        expert=expert,
        memory_gib=memory_gib,
        previous=previous or static_homes(cluster.topology, demand.layer_ids, demand.num_experts),
        warm=previous is not None,
        total_LE=total_LE,
        history_MLE=history_MLE if entry.sees == "history" else None,
    )


def _finished_plan(balancer: str, placement: Placement, request: PlacementRequest) -> StepPlan:
    """Return the validated plan of a placement, with bound and predicted seconds."""
    scheduled, demand, cluster = request.demand, request.demand, request.cluster
    if placement.micro_batch_S is not demand.micro_batch_S or placement.rank_S is not demand.rank_S:
        scheduled = demand.with_schedule(
            placement.micro_batch_S, placement.rank_S, cluster.num_ranks, len(demand.tokens_MLRE)
        )
    R, G = cluster.num_ranks, cluster.ranks_per_node
    bound_ML = reachable_bound(scheduled.load_MLE, placement.home_LE, R, G, placement.slots, placement.scope)
    plan = StepPlan.of_placement(
        placement, request.previous, bound_ML, balancer=balancer, demand_digest=demand.digest()
    )
    limits = ScheduleLimits.of_demand(demand, rank_tokens=request.budget.rank_tokens)
    validate_plan(  # before its loads are used
        plan,
        cluster.topology,
        demand,
        rank_tokens=limits.rank_tokens,
        rank_attention=limits.rank_attention,
        memory_bytes=cluster.memory_bytes,
        expert=request.expert,
    )
    return replace(plan, predicted=predict(plan, scheduled, cluster, request.expert).as_dict())


def _seconds(predicted: Mapping[str, float], request: PlacementRequest) -> float:
    """Return the predicted seconds with 1 / `steps_served` of the moves."""
    relocation = predicted["relocation"]
    return predicted["total"] - relocation + relocation / request.budget.steps_served
