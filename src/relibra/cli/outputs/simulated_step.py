"""`simulate_balancer`: one step, planned by a balancer and simulated, for `relibra simulate` and `relibra sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relibra.cli.inputs.requests import SimulationRequest
from relibra.cli.inputs.workload import Workload, budget_for

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster
    from relibra.planning.plan import StepPlan
    from relibra.planning.traffic.distinct_rows import DistinctRows
    from relibra.routing.demand import ScheduledDemand
    from relibra.simulation import Execution, MemoryUse, ModelShape, SimulatedStep


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedPlan:
    """The simulated step of one plan.

    step            with its part of the moves, which are spread over the steps that they serve
    moving_seconds  of all moves, once before the step
    skew            load of the busiest ranks / mean load of ranks, over micro-batches and layers
    rows_counted    whether rows between ranks are counted token by token; else they are a lower bound
    """

    plan: StepPlan
    step: SimulatedStep
    moving_seconds: float
    memory: MemoryUse
    skew: float
    rows_counted: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenChoices:
    """Experts that each token of a trace chose, and the sample of the demand that the token belongs to."""

    experts_TLK: ndarray
    sample_T: ndarray

    def count_rows(self, plan: StepPlan, scheduled: ScheduledDemand) -> DistinctRows | None:
        """Count the tokens that travel from rank to rank and to node; None where that would take too long."""
        from relibra.planning.traffic.distinct_rows import MAX_PAIRS, distinct_rows_of_step

        M, L, R, _ = scheduled.tokens_MLRE.shape
        if M * L * R * R > MAX_PAIRS:
            return None
        return distinct_rows_of_step(plan, scheduled, self.experts_TLK, self.sample_T)


def open_token_choices(workload: Workload) -> TokenChoices:
    """Read the tokens that a demand was counted from."""
    from relibra.routing.demand_rows import sample_of_rows

    routes = workload.open_routes()
    return TokenChoices(experts_TLK=routes.experts_TLK, sample_T=sample_of_rows(routes, workload.demand))


def execution_of(request: SimulationRequest) -> Execution:
    """Return how the step is executed."""
    from relibra.planning.registry import is_live
    from relibra.simulation import Execution

    return Execution(
        pipeline_stages=request.pipeline_stages,
        recompute_activations=request.recompute,
        live=is_live(request.balancer),
    )


def simulate_balancer(
    request: SimulationRequest, workload: Workload, tokens: TokenChoices, model: ModelShape
) -> SimulatedPlan:
    """Plan with the requested balancer and simulate the step.

    Plans of relibra that lose to static or to keeping the homes are replaced, as in training; those of others are not.

    tokens    of the workload
    model     with the layers, experts and choices of the routes
    raises    ConfigError, before anything is planned, for a layout that does not fit
    """
    from relibra.planning.planner import plan_step
    from relibra.simulation import ParallelLayout, memory_use, simulate_step, with_mini_batches

    machine, demand = workload.machine, workload.demand
    layout = ParallelLayout(expert_parallel=machine.num_ranks, pipeline_stages=request.pipeline_stages)
    layout.check(machine, model)
    plan = plan_step(
        demand,
        machine,
        budget_for(request, workload),
        request.balancer,
        expert=model.expert,
        history_MLE=workload.history_MLE,
        never_worse=request.balancer == "relibra",
    )
    scheduled, execution = with_mini_batches(plan.scheduled(demand), execution_of(request))
    distinct = tokens.count_rows(plan, scheduled)
    step = simulate_step(plan, scheduled, machine, model, execution, distinct=distinct)
    return SimulatedPlan(
        plan=plan,
        step=step.with_relocation_over(request.steps),
        moving_seconds=step.terms["relocation"],
        memory=memory_use(plan, scheduled, machine, model, execution),
        skew=plan.skew(scheduled),
        rows_counted=distinct is not None,
    )


def count_tokens(demand: ScheduledDemand, model: ModelShape) -> int:
    """Return the tokens of a scheduled step."""
    return int(demand.load_MLE[:, 0].sum()) // model.top_k


def moves_in_words(steps: int) -> str:
    """Return how moves of homes are charged, for a legend."""
    return (
        f"seconds include 1/{steps} of the moves of experts to new homes (--steps {steps})"
        if steps > 1
        else ("seconds include all moves of experts to new homes (--steps 1)")
    )


def is_static(plan: StepPlan, static: StepPlan) -> bool:
    """Return whether a plan is the static layout: its homes, its schedule, no copies."""
    import numpy as np

    same = all(
        np.array_equal(getattr(plan, name), getattr(static, name)) for name in ("home_LE", "micro_batch_S", "rank_S")
    )
    return same and not plan.num_copies


def compared_figures(one: SimulatedPlan, static: SimulatedPlan, tokens: int) -> dict[str, object]:
    """Return the figures of a plan beside the static layout of the same workload, for JSON."""
    step = one.step
    return {
        **step.figures(),
        "rows_counted": one.rows_counted,
        "moving_seconds": one.moving_seconds,
        "ratio_to_static": static.step.seconds / step.seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / step.seconds,
        "tokens_per_second_per_rank": tokens / step.seconds / step.layout.num_ranks,
        "static_tokens_per_second_per_rank": tokens / static.step.seconds / static.step.layout.num_ranks,
        "skew": one.skew,
        "copies": one.plan.num_copies,
        "kept_static": is_static(one.plan, static.plan),
        "memory_bytes": one.memory.total,
        "memory_warning": one.memory.warning,
    }


def limits(one: SimulatedPlan, machine: Cluster, model: ModelShape) -> dict[str, object]:
    """Return what limits a simulated step: overlap ratios, and sentences with the largest part first."""
    from relibra.simulation import advice
    from relibra.simulation.limits import overlap_ratios, sustained_overlap_ratios

    return {
        "overlap_ratio": overlap_ratios(machine, model.expert),
        "advice": advice(one.step, machine, model, one.memory),
        "sustained_overlap_ratio": sustained_overlap_ratios(machine, model.expert),
    }


def rows_in_words(one: SimulatedPlan) -> str:
    """Return where the rows between ranks come from."""
    return (
        "rows between ranks are counted token by token"
        if one.rows_counted
        else "rows between ranks are a lower bound from pairs of experts: this step is too large to count them"
    )


def static_plan_in_words(balancer: str, chosen: SimulatedPlan, static: SimulatedPlan, workload: Workload) -> str:
    """Return why a balancer kept the static layout or had no history, and what changes that; else an empty string."""
    if missing := workload.missing_history(balancer):
        return missing
    if balancer == "static" or not is_static(chosen.plan, static.plan):
        return ""
    kept = f"{balancer} kept the static layout"
    if not balancer.startswith("relibra"):
        return kept
    return (
        f"{kept}: at {workload.tokens_per_rank:,.0f} tokens per rank and micro-batch no change saves more seconds "
        "than it costs; a larger --micro-batch-tokens may change that"
    )
