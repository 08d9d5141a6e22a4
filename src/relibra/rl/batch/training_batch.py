"""`TrainingBatch`: the responses of a step where they are trained, cut into micro-batches, and the plan of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from jaxtyping import Int64
from numpy import ndarray
from torch import nn

from relibra.parallel import execute_plan
from relibra.parallel.balanced import balanced_layers
from relibra.planning.plan import StepPlan
from relibra.replay import BatchRoutes, RoutingReplay, replay_routing
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.step_plan import demand_of, plan_together, schedule_of, tabulate
from relibra.rl.batch.token_batch import MicroBatch, make_micro_batch, routes_of
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy
from relibra.rl.rollout.response import Response
from relibra.rl.rollout.response_tensors import exchange_responses
from relibra.rl.update.policy_update import Around
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """One rank's part of a step.

    responses       by sample id
    micro_batches   by their number in the step; filler where this rank has nothing to do
    schedule        of all ranks
    mini_batch_S    of each of this rank's responses
    demand          what the replayed routes ask of every expert; None: nothing is replayed
    plan            who computes it; None: every expert at its home
    """

    responses: list[Response]
    micro_batches: list[MicroBatch]
    schedule: Schedule
    mini_batch_S: Int64[ndarray, " S"]
    demand: ScheduledDemand | None
    plan: StepPlan | None

    def of_mini_batch(self, number: int) -> list[tuple[int, MicroBatch]]:
        """Return the micro-batches of a mini-batch, with their numbers in the step."""
        chosen = np.flatnonzero(self.schedule.mini_batch_M == number)
        return [(int(m), self.micro_batches[m]) for m in chosen]


def place(
    responses: Sequence[Response],
    policy: Policy,
    config: RunConfig,
    *,
    previous: StepPlan | None,
    ranks_per_node: int,
    plan: bool,
) -> TrainingBatch:
    """Decide where and when every response is trained, and bring it there; collective.

    plan   plan from the routes of the responses, and replay them; False: the model routes itself for now
    """
    table = tabulate(responses)
    schedule, demand, step_plan = schedule_of(table, config), None, None
    if plan and len(table.sample_id_S):
        trace = routes_of(
            responses, num_experts=policy.num_experts, layer_ids=policy.layer_ids, source="rollout of this step"
        )
        demand = demand_of(trace, table, schedule, (len(policy.layer_ids), policy.num_experts))
        if policy.balanced:
            step_plan = plan_together(demand, config, ranks_per_node, previous)
            schedule = replace(schedule, micro_batch_S=step_plan.micro_batch_S, rank_S=step_plan.rank_S)
    place_s = table.place_of([response.sample_id for response in responses])
    own = exchange_responses(responses, schedule.rank_S[place_s].tolist())
    return _cut(own, table.place_of([response.sample_id for response in own]), schedule, demand, step_plan, policy)


def with_recorded_routes(
    batch: TrainingBatch,
    responses: list[Response],
    policy: Policy,
    config: RunConfig,
    *,
    previous: StepPlan | None,
    ranks_per_node: int,
) -> TrainingBatch:
    """Return the batch with routes that its own recompute pass recorded (R2), and a plan from them; collective.

    responses   those of the batch, with the recorded routes
    """
    table = tabulate(responses)
    if not len(table.sample_id_S):
        return batch
    trace = routes_of(responses, num_experts=policy.num_experts, layer_ids=policy.layer_ids, source="recompute pass")
    demand = demand_of(trace, table, batch.schedule, (len(policy.layer_ids), policy.num_experts))
    plan = None
    if policy.balanced:  # responses are where they are trained: the schedule stays
        fixed = config.model_copy(update={"plan": config.plan.model_copy(update={"pack": False})})
        plan = plan_together(demand, fixed, ranks_per_node, previous)
    places = table.place_of([response.sample_id for response in responses])
    return _cut(responses, places, batch.schedule, demand, plan, policy)


def _cut(
    own: list[Response],
    place_s: Int64[ndarray, " s"],
    schedule: Schedule,
    demand: ScheduledDemand | None,
    plan: StepPlan | None,
    policy: Policy,
) -> TrainingBatch:
    trace = None
    if demand is not None:
        trace = routes_of(own, num_experts=policy.num_experts, layer_ids=policy.layer_ids, source="this step")
    micro_batch_s = schedule.micro_batch_S[place_s]
    return TrainingBatch(
        responses=own,
        micro_batches=[
            make_micro_batch(own, np.flatnonzero(micro_batch_s == m).tolist(), trace)
            for m in range(schedule.num_micro_batches)
        ],
        schedule=schedule,
        mini_batch_S=schedule.mini_batch_S[place_s].astype(np.int64),
        demand=demand,
        plan=plan,
    )


def homes_at_rest(policy: Policy, ranks_per_node: int) -> StepPlan | None:
    """Return where the experts are now, as a plan for no micro-batch at all; None where they cannot move."""
    if not policy.balanced:
        return None
    homes_LE = np.stack([layer.physical_to_logical_E for layer in balanced_layers(policy.trained).values()])
    homes_LE, num_ranks = homes_LE.astype(np.int16), dist.get_world_size()
    none = np.zeros(0, dtype=np.int32)
    return StepPlan(
        balancer="at rest",
        num_nodes=num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        layer_ids=np.array(policy.layer_ids, dtype=np.int32),
        micro_batch_S=none,
        rank_S=none,
        physical_to_logical_map=homes_LE,
        previous_map=homes_LE,
        replica_MLRB=np.zeros((0, len(homes_LE), num_ranks, 0), dtype=np.int16),
        quota_MLRB=np.zeros((0, len(homes_LE), num_ranks, 0), dtype=np.int32),
        resident=False,
        scope="node",
        bound_ML=np.zeros((0, len(homes_LE)), dtype=np.int64),
    )


@contextmanager
def executing(model: nn.Module, batch: TrainingBatch, config: RunConfig) -> Iterator[Around]:
    """Give what each micro-batch of the batch runs in: the plan, the replay of its routes, or nothing; collective."""
    if batch.plan is None or batch.demand is None:
        yield lambda number: replaying(model, batch.micro_batches[number].routes)
        return
    with execute_plan(model, batch.plan, batch.demand, sums=config.plan.sums) as execution:
        yield lambda number: execution.micro_batch(number, batch.micro_batches[number].routes)


def replaying(model: nn.Module, routes: BatchRoutes | None) -> AbstractContextManager[RoutingReplay | None]:
    """Replay routes, if there are any."""
    return nullcontext() if routes is None else replay_routing(model, routes)
