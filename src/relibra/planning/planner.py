"""`plan_step`: run a balancer, price its placement, and return it or a plan without replicas, whichever is cheaper."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import PlanError
from relibra.planning.analysis.bounds import reachable_bound
from relibra.planning.balancer import Balancer, PlacementRequest
from relibra.planning.balancers.resident_number import with_cheapest_resident_slots
from relibra.planning.budget import DEFAULT_MODEL, Budget
from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape
from relibra.planning.costs.prediction import predict
from relibra.planning.placement import Homes, Placement, static_homes
from relibra.planning.plan import StepPlan
from relibra.planning.registry import BALANCERS
from relibra.planning.schedule.limits import ScheduleLimits
from relibra.planning.search.deadline import Deadline
from relibra.planning.validation import validate_plan
from relibra.routing.demand import ScheduledDemand

DEFAULT_EXPERT = EXPERT_SHAPES[DEFAULT_MODEL]


def plan_step(
    demand: ScheduledDemand,
    cluster: Cluster,
    budget: Budget | None = None,
    balancer: str = "relibra",
    *,
    expert: ExpertShape | None = None,
    previous: Homes | None = None,
    history_MLE: Int[ndarray, "H L E"] | None = None,
    never_worse: bool = True,
) -> StepPlan:
    """Plan one step: homes, schedule, replicas and quotas.

    Under its own objective a plan is never worse than the homes before the step without replicas; where experts may
    move, also never worse than the static layout. `StepPlan.balancer` names what was returned.

    demand        token-slots under a schedule (`Demand.with_schedule`) over as many ranks as the cluster has
    balancer      a name of `BALANCERS`, or "auto": the cheapest plan of all that see the step; `history_MLE` and
                  `never_worse` are then not used
    expert        sizes of one expert, for the objective in seconds; None: the token objective, and seconds are
                  predicted for experts like those of Qwen3-30B-A3B
    previous      current homes, for example the plan of the last step; None: the static layout
    history_MLE   loads of earlier micro-batches, for balancers that see "history"; None: they plan from even loads
    never_worse   False: return the plan of the balancer even if one without replicas is cheaper, to compare balancers
    raises        PlanError when sizes of demand, cluster and budget disagree
    """
    budget = budget or Budget()
    if expert is None and budget.objective == "seconds":
        raise PlanError("the objective in seconds needs the size of an expert: pass expert=, or objective 'tokens'")
    budget = replace(budget, objective=budget.objective or ("tokens" if expert is None else "seconds"))
    budget = budget.with_resident_slots(expert or DEFAULT_EXPERT, len(demand.layer_ids))
    _check(demand, cluster, budget, previous, history_MLE)
    if balancer == "auto":
        return _cheapest(demand, cluster, budget, expert=expert, previous=previous)
    if balancer not in BALANCERS:
        raise PlanError(f"balancer {balancer!r} is unknown: allowed are {', '.join([*BALANCERS, 'auto'])}")
    start = time.perf_counter()
    request = _request(demand, cluster, budget, expert or DEFAULT_EXPERT, previous, history_MLE, BALANCERS[balancer])
    memory_bytes = None if expert is None else cluster.memory_bytes  # slots of unknown size are not checked
    plan = _finished_plan(balancer, BALANCERS[balancer].decide(request), request, memory_bytes)
    plan = replace(plan, plan_seconds=time.perf_counter() - start)
    if never_worse and balancer != "static":
        return _plan_or_bare_homes(plan, request, memory_bytes)
    return plan


def settle_resident_slots(
    demand: ScheduledDemand, cluster: Cluster, budget: Budget, *, expert: ExpertShape, previous: Homes | None = None
) -> Budget:
    """Return the budget with the cheapest number of resident slots for the whole step.

    Ranks that then plan single layers all use it.

    budget   its objective and its resident slots are set: not None
    """
    request = _request(demand, cluster, budget, expert, previous, None, BALANCERS["relibra"])
    settled = with_cheapest_resident_slots(request, Deadline(budget.deadline_seconds)).budget
    return replace(settled, fewer_resident=False)


def _plan_or_bare_homes(plan: StepPlan, request: PlacementRequest, memory_bytes: int | None) -> StepPlan:
    """Return the plan, or the homes before the step or the static layout without replicas, where these are cheaper."""
    demand, budget, previous = request.demand, request.budget, request.previous
    best, best_name, best_placement = _cost(plan, request), "", None
    static = static_homes(request.cluster.topology, demand.layer_ids, demand.num_experts)
    may_move = budget.move_homes and not np.array_equal(static.home_LE, previous.home_LE)
    at_start = np.array_equal(static.physical_to_logical_map, previous.physical_to_logical_map)
    bare_homes = [("static" if at_start else "homes kept", previous)]
    if may_move:
        bare_homes.append(("static", static))
    for name, homes in bare_homes:
        placement = request.placement(homes.home_LE, *request.empty_slots())
        bare = StepPlan.of_placement(placement, previous, np.zeros(demand.load_MLE.shape[:2], np.int64), balancer=name)
        if budget.objective == "seconds":
            found = predict(bare, demand, request.cluster, request.expert, threads=budget.threads)
            bare = replace(bare, predicted=found.as_dict())
        cost = _cost(bare, request)
        if cost < best:
            best, best_name, best_placement = cost, name, placement
    if best_placement is None:
        return plan
    made = _finished_plan(f"{best_name} (instead of {plan.balancer})", best_placement, request, memory_bytes)
    return replace(made, plan_seconds=plan.plan_seconds)


def _cheapest(
    demand: ScheduledDemand, cluster: Cluster, budget: Budget, *, expert: ExpertShape | None, previous: Homes | None
) -> StepPlan:
    """Return the cheapest plan within the budget of all balancers that see the step.

    relibra runs first. After half of `deadline_seconds` no further balancer starts; each balancer has the whole
    deadline for itself.
    """
    clock = Deadline(budget.deadline_seconds)
    knowing = [name for name, entry in BALANCERS.items() if entry.sees not in ("nothing", "history")]
    plans: list[StepPlan] = []
    for name in sorted(knowing, key=lambda name: name != "relibra"):
        if not plans or clock.allows(0.5):
            plans.append(plan_step(demand, cluster, budget, name, expert=expert, previous=previous))
    allowed = [
        plan
        for plan in plans
        if (budget.move_homes or plan.num_moved == 0)
        and (budget.cross_node_copies or plan.num_cross_node_copies == 0)
        and plan.slots <= budget.slots
        and plan.resident_slots <= (budget.resident_slots or 0)
    ]
    request = _request(demand, cluster, budget, expert or DEFAULT_EXPERT, previous, None, BALANCERS["relibra"])
    best = min(allowed, key=lambda plan: _cost(plan, request))
    return replace(best, plan_seconds=sum(plan.plan_seconds for plan in plans))


def _check(
    demand: ScheduledDemand,
    cluster: Cluster,
    budget: Budget,
    previous: Homes | None,
    history_MLE: ndarray | None,
) -> None:
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
    L, E = demand.counts_SLE.shape[1:]
    total_LE = np.ones((L, E))
    if entry.sees in ("step totals", "micro-batches"):
        total_LE = demand.load_MLE.sum(axis=0).astype(np.float64)
    elif entry.sees == "history" and history_MLE is not None and len(history_MLE):
        total_LE = history_MLE.sum(axis=0).astype(np.float64)
    return PlacementRequest(
        demand=demand,
        cluster=cluster,
        budget=budget,
        expert=expert,
        previous=previous or static_homes(cluster.topology, demand.layer_ids, E),
        warm=previous is not None,
        total_LE=total_LE,
        history_MLE=history_MLE if entry.sees == "history" else None,
    )


def _finished_plan(
    balancer: str, placement: Placement, request: PlacementRequest, memory_bytes: int | None
) -> StepPlan:
    """Return the validated plan of a placement, with bound and predicted seconds.

    memory_bytes   of a rank, for slots; None: not checked
    """
    demand, cluster = request.demand, request.cluster
    scheduled = demand
    if placement.micro_batch_S is not demand.micro_batch_S or placement.rank_S is not demand.rank_S:
        scheduled = demand.with_schedule(
            placement.micro_batch_S, placement.rank_S, cluster.num_ranks, len(demand.tokens_MLRE)
        )
    bound_ML = reachable_bound(
        scheduled.load_MLE,
        placement.home_LE,
        cluster.num_ranks,
        cluster.ranks_per_node,
        placement.slots,
        placement.scope,
    )
    plan = StepPlan.of_placement(
        placement,
        request.previous,
        bound_ML,
        balancer=balancer,
        objective=request.budget.objective or "",
        demand_digest=demand.digest(),
    )
    limits = ScheduleLimits.of_demand(
        demand, rank_tokens=request.budget.rank_tokens, token_slack=request.budget.token_slack
    )
    validate_plan(  # before its loads are used
        plan,
        cluster.topology,
        demand,
        rank_tokens=limits.rank_tokens,
        rank_attention=limits.rank_attention,
        memory_bytes=memory_bytes,
        expert=request.expert,
    )
    found = predict(plan, scheduled, cluster, request.expert, threads=request.budget.threads)
    return replace(plan, predicted=found.as_dict())


def _cost(plan: StepPlan, request: PlacementRequest) -> float:
    """Return the skew, or the predicted seconds with 1 / `steps_served` of the moves."""
    if request.budget.objective == "tokens":
        same = plan.micro_batch_S is request.demand.micro_batch_S and plan.rank_S is request.demand.rank_S
        return plan.skew(request.demand if same else plan.scheduled(request.demand))
    relocation = plan.predicted["relocation"]
    return plan.predicted["total"] - relocation + relocation / request.budget.steps_served
