"""`simulate_balancer`: one step, planned by a balancer and simulated, for `relibra simulate` and `relibra sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relibra.cli.inputs.requests import SimulationRequest
from relibra.cli.inputs.workload import Workload, budget_for

if TYPE_CHECKING:
    from relibra.cluster import Cluster
    from relibra.planning.plan import StepPlan
    from relibra.planning.traffic.distinct_rows import DistinctRows
    from relibra.routing.demand import ScheduledDemand
    from relibra.simulation import Execution, MemoryUse, ModelShape, SimulatedStep


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedPlan:
    """The simulated step of one plan.

    machine, model  that were simulated; the model has the layers, experts and choices of the routes
    step            with its part of the moves, which are spread over the steps that they serve
    moving_seconds  of all moves, once before the step
    how             it was executed, in which stages
    skew            load of the busiest ranks / mean load of ranks, over micro-batches and layers
    demand, rows    of the step; rows are tokens that travel between ranks, None: not counted
    """

    machine: Cluster
    model: ModelShape
    tokens: int
    plan: StepPlan
    step: SimulatedStep
    how: Execution
    moving_seconds: float
    memory: MemoryUse
    skew: float
    demand: ScheduledDemand
    rows: DistinctRows | None

    @property
    def rows_counted(self) -> bool:
        """Whether rows between ranks are counted token by token; else they are a lower bound."""
        return self.rows is not None

    def ways_to_send(self) -> list[dict[str, object]]:
        """Return the table of ways to send the rows."""
        from relibra.reporting.data.ways_to_send import ways_to_send

        expert, top_k = self.model.expert, self.model.top_k
        return [way._asdict() for way in ways_to_send(self.plan, self.demand, self.machine, expert, top_k, self.rows)]

    def limits(self) -> dict[str, object]:
        """Return what limits the step, for JSON and for a terminal: overlap ratios and `step_limits`."""
        from relibra.simulation.limits import overlap_ratios, step_limits, sustained_overlap_ratios

        return {
            "overlap_ratio": overlap_ratios(self.machine, self.model.expert),
            "sustained_overlap_ratio": sustained_overlap_ratios(self.machine, self.model.expert),
            "limits": [limit._asdict() for limit in step_limits(self.step)],
        }

    def equals(self, static: SimulatedPlan) -> bool:
        """Return whether the plan is the static layout: its homes, its schedule, no copies."""
        import numpy as np

        own, other, same = self.plan, static.plan, ("home_LE", "micro_batch_S", "rank_S")
        return not own.num_copies and all(np.array_equal(getattr(own, name), getattr(other, name)) for name in same)

    def stage_layers(self) -> str:
        """Return the expert layers of each stage, or of each part of a round (forward | both | backward), x rounds."""
        cut = self.how.round_cut
        if cut is None:
            return "+".join(str(cut.stop - cut.start) for cut in self.step.layout.stage_layers(self.model.moe_layers))
        sides = ("+".join(map(str, side)) for side in (cut.forward, (cut.fused,), cut.backward) if side)
        return f"{' | '.join(sides)} x {cut.rounds}"

    def figures(self, static: SimulatedPlan) -> dict[str, object]:
        """Return the figures of the step beside the static layout of the same workload, for JSON."""
        step, tokens = self.step, self.tokens
        return {
            **step.figures(),
            "rows_counted": self.rows_counted,
            "moving_seconds": self.moving_seconds,
            "ratio_to_static": static.step.seconds / step.seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / step.seconds,
            "tokens_per_second_per_rank": tokens / step.seconds / step.layout.num_ranks,
            "static_tokens_per_second_per_rank": tokens / static.step.seconds / static.step.layout.num_ranks,
            "skew": self.skew,
            "copies": self.plan.num_copies,
            "kept_static": self.equals(static),
            "stage_layers": self.stage_layers(),
            "memory_bytes": self.memory.total,
            "memory_warning": self.memory.warning,
        }


def execution_of(request: SimulationRequest) -> Execution:
    """Return how the step is executed."""
    from relibra.planning.registry import find_balancer
    from relibra.simulation import Execution

    return Execution(
        pipeline_stages=request.pipeline_stages,
        recompute_activations=request.recompute,
        live=find_balancer(request.balancer).sees == "live",
    )


def simulate_balancer(request: SimulationRequest, workload: Workload) -> SimulatedPlan:
    """Plan with the requested balancer and simulate the step.

    Plans of relibra that lose to static or to keeping the homes are replaced, as in training; those of others are not.

    raises    ConfigError, before anything is planned, for a layout that does not fit
    """
    from relibra.planning.planner import plan_step
    from relibra.simulation import ParallelLayout, cut_model, memory_use

    machine, demand = workload.machine, workload.demand
    model = cut_model(workload.model, demand)
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
    step, execution, scheduled, rows = simulate_plan(plan, request, workload, model)
    return SimulatedPlan(
        machine=machine,
        model=model,
        tokens=int(demand.load_MLE[:, 0].sum()) // model.top_k,
        plan=plan,
        step=step.with_relocation_over(request.steps),
        how=execution,
        moving_seconds=step.terms["relocation"],
        memory=memory_use(plan, scheduled, machine, model, execution),
        skew=plan.skew(scheduled),
        demand=scheduled,
        rows=rows,
    )


def simulate_plan(
    plan: StepPlan, request: SimulationRequest, workload: Workload, model: ModelShape
) -> tuple[SimulatedStep, Execution, ScheduledDemand, DistinctRows | None]:
    """Return the simulated step of a plan, how it is executed, its demand, and its rows between ranks if counted."""
    from relibra.simulation import simulate_step, with_mini_batches
    from relibra.simulation.step.stage_choice import choose_stages

    machine = workload.machine
    scheduled, execution = with_mini_batches(plan.scheduled(workload.demand), execution_of(request))
    rows = workload.count_rows(plan, scheduled)
    execution = choose_stages(
        plan, scheduled, machine, model, execution, cut=request.stage_cut, pipeline=request.pipeline, distinct=rows
    )
    return simulate_step(plan, scheduled, machine, model, execution, distinct=rows), execution, scheduled, rows
