"""A training step under a plan, as events of computing, sending and waiting, on machines of any size.

Expert-parallel groups are simulated one after the other, so memory does not grow with their number. Inside a group the
walk through the layers is vectorised over micro-batches and ranks (`passes`), and pipeline stages are events
(`pipeline_schedule`). Equal inputs give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.planning.costs.copies import relocation_seconds
from relibra.planning.costs.layer_costs import check_demand, check_fit
from relibra.planning.costs.step_bytes import add_bytes, moved_bytes
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.cost_model import (
    STATE_BYTES,
    gradient_reduction_seconds,
    optimizer_seconds,
    owned_parameters,
    owned_share,
)
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.step.group_run import Execution, GroupRun, MiniBatchRun, run_group
from relibra.simulation.step.passes import TERMS
from relibra.simulation.step.stage_costs import StageCosts, stage_costs
from relibra.simulation.step.step_result import SimulatedStep

LIVE_NOTE = (
    "the balancer is live: in each layer, after the router, counts are exchanged, the plan is solved, weights leave"
)
ALL_TERMS = (*TERMS, "pipeline", "gradients", "optimizer", "relocation")


def simulate_step(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution | None = None,
    *,
    distinct: DistinctRows | None = None,
) -> SimulatedStep:
    """Simulate one training step.

    demand          under the schedule of the plan (`plan.scheduled`). With `group_M`
                    (`ScheduledDemand.of_groups`) each group runs its own micro-batches, on ranks of its own; where
                    groups stand for a trainer's mini-batches, apply `with_mini_batches` before
    cluster         of one expert-parallel group, as for `plan_step`; every other group and stage has
                    as many nodes of its own, even where it does not fill one
    how             None: one stage, one optimizer step, copies overlapped
    distinct        tokens that travel from rank to rank and to node (`distinct_rows_of_step`), of all micro-batches;
                    None: their lower bound from `demand.pairs_LEE`, or, without pairs, every token-slot
    raises          PlanError, ConfigError when plan, demand, cluster and model do not fit together
    """
    how = (how or Execution()).on(cluster)
    runs = [run_group(costs, how) for costs in costs_of_groups(plan, demand, cluster, model, how, distinct)]
    return assemble(plan, runs, cluster, model, how)


def simulate_groups(
    groups: Iterable[tuple[StepPlan, ScheduledDemand]],
    cluster: Cluster,
    model: ModelShape,
    how: Execution | None = None,
) -> SimulatedStep:
    """Simulate a step of several expert-parallel groups, each with a plan and a scheduled demand of its own.

    groups    may be a generator: one group is held at a time. All have the same experts at the same homes
    raises    as `simulate_step`; ConfigError without a group, or when homes differ
    """
    how = (how or Execution()).on(cluster)
    runs: list[GroupRun] = []
    first: StepPlan | None = None
    for plan, demand in groups:
        if first is not None and not np.array_equal(plan.home_LE, first.home_LE):
            raise ConfigError(
                f"group {len(runs)} has other homes than group 0: groups share the gradients of experts, so plan all "
                "together (ScheduledDemand.of_groups) or with the same homes"
            )
        first = first or plan
        runs.append(run_group(costs_of(plan, demand, cluster, model, how), how))
    if first is None:
        raise ConfigError("a step without expert-parallel groups: pass at least one (plan, demand)")
    return assemble(first, runs, cluster, model, how)


def with_mini_batches(demand: ScheduledDemand, how: Execution | None = None) -> tuple[ScheduledDemand, Execution]:
    """Return the demand as one expert-parallel group, and its `group_M` as optimizer steps one after another.

    A trainer's schedule has its mini-batches in `group_M`; all of them run on the same ranks, while `simulate_step`
    takes `group_M` for expert-data-parallel groups, each on ranks of its own.

    demand   with ascending `group_M`, or None: returned as it is
    """
    how = how or Execution()
    if demand.group_M is None:
        return demand, how
    sizes = np.unique(demand.group_M, return_counts=True)[1].tolist()
    return replace(demand, group_M=None), replace(how, mini_batches=tuple(sizes))


def costs_of_groups(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution,
    distinct: DistinctRows | None,
    parts: list[slice] | None = None,
) -> Iterator[list[StageCosts]]:
    """Yield the costs (`costs_of`) of each expert-parallel group, whose micro-batches keep their order."""
    for number_M in micro_batches_of_groups(plan, demand):
        own = (plan, demand) if demand.group_M is None else only_micro_batches(plan, demand, number_M)
        rows = None if distinct is None else distinct.of_micro_batches(number_M)
        yield costs_of(*own, cluster, model, how, rows, parts)


def micro_batches_of_groups(plan: StepPlan, demand: ScheduledDemand) -> list[Int64[ndarray, " M"]]:
    """Return the numbers of each group's micro-batches.

    raises   PlanError when the demand is not the plan's
    """
    check_demand(plan, demand)
    if demand.group_M is None:
        return [np.arange(len(plan.replica_MLRB))]
    return [np.flatnonzero(demand.group_M == group) for group in range(int(demand.group_M.max(initial=0)) + 1)]


def only_micro_batches(
    plan: StepPlan, demand: ScheduledDemand, number_M: Int64[ndarray, " M"]
) -> tuple[StepPlan, ScheduledDemand]:
    """Return a plan and its scheduled demand cut down to some micro-batches, numbered from 0 in the given order."""
    own_demand = replace(demand.of_micro_batches(number_M), group_M=None)
    own_plan = replace(
        plan,
        micro_batch_S=own_demand.micro_batch_S,
        replica_MLRB=plan.replica_MLRB[number_M],
        quota_MLRB=plan.quota_MLRB[number_M],
        bound_ML=plan.bound_ML[number_M],
        group_M=None if plan.group_M is None else plan.group_M[number_M],
    )
    return own_plan, own_demand


def costs_of(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution,
    distinct: DistinctRows | None = None,
    parts: list[slice] | None = None,
) -> list[StageCosts]:
    """Return the costs of one group; raises ConfigError or PlanError when plan, model and cluster do not fit.

    parts   slices of MoE layers, each costed as one; None: those of `how.round_cut`, else of the stages
    """
    layout = how.layout(plan.num_ranks, 1)
    layout.check(cluster, model)
    check_fit(plan, demand, cluster)
    (M, L), E = plan.replica_MLRB.shape[:2], plan.num_experts
    if (model.moe_layers, model.experts) != (L, E):
        raise ConfigError(
            f"a plan of {L} layers and {E} experts does not fit model {model.name!r} of "
            f"{model.moe_layers} and {model.experts}: pass the model that was routed, or "
            "dataclasses.replace(model, moe_layers=...)"
        )
    if demand.top_k is not None and demand.top_k != model.top_k:
        raise ConfigError(
            f"tokens of the demand picked {demand.top_k} experts, those of model {model.name!r} pick {model.top_k}: "
            "pass the model that was routed"
        )
    if how.num_mini_batches > M:
        raise ConfigError(f"{how.num_mini_batches} mini-batches of {M} micro-batches: use at most {M}")
    if not isinstance(how.mini_batches, int) and sum(how.mini_batches) != M:
        raise ConfigError(
            f"mini-batches of {sum(how.mini_batches)} micro-batches in all, the plan has {M}: "
            "each micro-batch belongs to one"
        )
    if parts is None and how.round_cut is not None:
        parts = how.round_cut.parts()
    return stage_costs(
        plan,
        demand,
        cluster,
        model,
        layout,
        parts=parts,
        overlap=how.overlap,
        live=how.live,
        shard_dense=how.shard_dense,
        distinct=distinct,
    )


def assemble(
    plan: StepPlan, runs: list[GroupRun], cluster: Cluster, model: ModelShape, how: Execution
) -> SimulatedStep:
    """Return the step of all groups, which wait for each other at the end of each mini-batch."""
    layout = how.layout(plan.num_ranks, len(runs))
    ends = ends_of_mini_batches(plan, runs, cluster, model, how)
    terms = dict.fromkeys(ALL_TERMS, 0.0)
    copying = 0.0
    for slowest, gradients, optimizer in ends:
        for name, seconds in slowest.busy.items():
            terms[name] += seconds
        terms["pipeline"] += max(0.0, slowest.seconds - sum(slowest.busy.values())) if how.pipeline_stages > 1 else 0.0
        terms["gradients"] += gradients
        terms["optimizer"] += optimizer
        copying += slowest.copying
    terms["relocation"] = _relocation(plan, cluster, model, layout)
    notes: tuple[str, ...] = (LIVE_NOTE,) if how.live else ()
    if not how.forward_only and not cluster.memory_bytes_per_second:
        notes += (f"the optimizer is left out: cluster {cluster.name!r} has no memory_bytes_per_second",)

    def of_ranks(parts_XDR: list[ndarray]) -> ndarray:
        return np.stack(parts_XDR, axis=1).reshape(-1)  # stage, group, rank

    return SimulatedStep(
        layout=layout,
        seconds=sum(terms.values()),
        terms=terms,
        stage_seconds={name: of_ranks([run.spent[name] for run in runs]) for name in runs[0].spent},
        waited_R=of_ranks([run.waited_DR for run in runs]),
        sent_bytes={name: of_ranks([run.sent[name] for run in runs]) for name in runs[0].sent},
        bytes=add_bytes(run.bytes for run in runs)._replace(moves=moved_bytes(plan.previous, plan, model.expert)),
        token_slots_R=of_ranks([run.token_slots_DR for run in runs]),
        expert_skew=_skew(runs, "experts"),
        attention_skew=_skew(runs, "attention"),
        copy_seconds=copying,
        useful_flops=sum(run.flops for run in runs),
        peak_flops_per_second=cluster.peak_flops_per_second,
        notes=notes,
    )


def _skew(runs: list[GroupRun], name: str) -> float:
    busiest, mean = (sum(run.uneven[name][i] for run in runs) for i in (0, 1))
    return busiest / mean if mean else 1.0


def ends_of_mini_batches(
    plan: StepPlan, runs: list[GroupRun], cluster: Cluster, model: ModelShape, how: Execution
) -> list[tuple[MiniBatchRun, float, float]]:
    """Return the slowest group of each mini-batch, and the seconds of gradients (not hidden) and optimizer after it.

    A stage sums its gradients beside its last backward pass and while stages before it still run; those of at
    least one layer come after that pass. Counted: from the end of the slowest group to the end of the last sum.
    """
    layout = how.layout(plan.num_ranks, len(runs))
    found = []
    for number in range(how.num_mini_batches):
        slowest = max((run.mini_batches[number] for run in runs), key=lambda run: run.seconds)  # ties: the first group
        gradients = optimizer = 0.0
        for stage, layers in enumerate(layout.stage_layers(model.moe_layers)):
            if how.forward_only:
                break
            num_layers = layers.stop - layers.start
            own = owned_parameters(model, layout, num_layers, first=stage == 0, last=stage == how.pipeline_stages - 1)
            whole = gradient_reduction_seconds(cluster, layout, *own, sharded=how.shard_dense)
            exposed = whole
            if how.overlap:
                exposed = max(whole - float(slowest.last_backward_D[stage]), whole / num_layers)
                exposed -= slowest.seconds - float(slowest.end_D[stage])
            gradients = max(gradients, exposed)
            if cluster.memory_bytes_per_second:
                seconds = optimizer_seconds(cluster, layout, *own)
                if how.fetches:  # master and moments are in host memory
                    seconds += float(cluster.host.seconds(STATE_BYTES * owned_share(layout, *own)))
                optimizer = max(optimizer, seconds)
        found.append((slowest, gradients + slowest.store_seconds, optimizer))
    return found


def _relocation(plan: StepPlan, cluster: Cluster, model: ModelShape, layout: ParallelLayout) -> float:
    """Return the seconds of the slowest stage: stages move the experts of their layers at the same time."""
    before, layers = plan.previous, np.arange(len(plan.layer_ids))
    return max(
        relocation_seconds(before.of_layers(layers[part]), plan.of_layers(layers[part]), cluster, model.expert)
        for part in layout.stage_layers(model.moe_layers)
    )
