"""`TrainingBatch`: the responses that a rank trains in a step, as micro-batches, with the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor, nn

from relibra.cluster import Cluster, Topology
from relibra.parallel import LiveBalancing, PlanExecution, balance_live, execute_plan
from relibra.parallel.balanced import balanced_layers
from relibra.planning.balancers.lasting import Residents
from relibra.planning.placement import Homes
from relibra.planning.plan import StepPlan
from relibra.replay import BatchRoutes, RoutingReplay, replay_routing
from relibra.rl.batch.plan_budget import slot_memory
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.step_plan import PlannedStep, count_demand, gather_table, make_step_schedule, plan_together
from relibra.rl.batch.token_batch import TokenBatch, compare_prompts, make_token_batch, with_routes
from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import PlanSettings
from relibra.rl.model.policy import Policy
from relibra.rl.model.sharding import is_balanced
from relibra.rl.rollout.response import Response
from relibra.rl.rollout.response_arrays import bytes_to_others, exchange_responses
from relibra.routing.demand import ScheduledDemand

MicroBatchContext = Callable[[int], AbstractContextManager[RoutingReplay | None]]
"""Context of the passes of a micro-batch, by its number: execution of the plan, replay of routes, or neither."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """One rank's part of a step.

    responses       sorted by sample id
    micro_batches   by their number in the step; filler where this rank has no response
    schedule        of all ranks
    demand          counted from the replayed routes; None: no routes are replayed
    plan            None: every expert at its home
    static_seconds  modelled seconds of the step without the plan; None without one
    lasting         replicas of the next step (`PlannedStep.lasting`)
    sent_bytes      of responses and routes that went from this rank to others
    prompt_pairs    routes of (token, layer) that were recorded again for shared prompts; how many of them name other
                    experts than those of the first response, which are replayed
    """

    responses: list[Response]
    micro_batches: list[TokenBatch]
    schedule: Schedule
    demand: ScheduledDemand | None
    plan: StepPlan | None
    static_seconds: float | None = None
    lasting: Future[Residents | None] | None = None
    sent_bytes: int = 0
    prompt_pairs: tuple[int, int] = (0, 0)

    def of_mini_batch(self, number: int) -> list[tuple[int, TokenBatch]]:
        """Return the micro-batches of a mini-batch, with their numbers in the step."""
        chosen = np.flatnonzero(self.schedule.mini_batch_M == number)
        return [(int(m), self.micro_batches[m]) for m in chosen]

    def following(self, planned: PlannedStep | None) -> TrainingBatch:
        """Return the batch with a plan, if there is one."""
        if planned is None:
            return self
        return replace(self, plan=planned.plan, static_seconds=planned.static_seconds, lasting=planned.lasting)

    def filled(self, **values: Sequence[Any]) -> TrainingBatch:
        """Return the batch with fields of its `TokenBatch`es set: for each field one tensor per micro-batch."""
        micro_batches = [
            replace(micro_batch, **{name: per_batch[m] for name, per_batch in values.items()})
            for m, micro_batch in enumerate(self.micro_batches)
        ]
        return replace(self, micro_batches=micro_batches)


def build_batch(
    responses: list[Response], policy: Policy, config: RunConfig, *, previous: Homes | None, cluster: Cluster
) -> TrainingBatch:
    """Decide when and on which rank each response is trained, send it there, and lay out micro-batches; collective.

    With replay of the rollout's routes (R3), the step is planned from them.

    responses   of this rank, with validated routes if these are replayed. The list is empty afterwards, so that
                routes that were sent leave memory
    previous    current homes, with replicas that last, if any; None: the static layout
    """
    table = gather_table(responses)
    by_group = config.algorithm.advantage == "group"
    schedule = make_step_schedule(
        table, config.update, by_group=by_group, seed=config.run.seed, shares_prompts=policy.shares_prompts
    )
    demand, planned = None, None
    if config.algorithm.replay == "R3" and len(table.sample_id_S):
        demand = count_demand(responses, table, schedule, **_sizes(policy))
        if policy.balanced and not config.plan.live:
            planned = plan_together(
                demand,
                config.plan,
                cluster,
                policy.model_shape.expert,
                previous,
                memory_gib=slot_memory(config, demand, cluster, policy.model_shape),
                rank_tokens=config.update.micro_batch_tokens,
            )
            schedule = replace(schedule, micro_batch_S=planned.plan.micro_batch_S, rank_S=planned.plan.rank_S)
    targets = schedule.rank_S[table.index_of([response.sample_id for response in responses])].tolist()
    sent_bytes = bytes_to_others(responses, targets)
    own = exchange_responses(responses, targets)
    routes = _take_routes(own)
    places = table.index_of([response.sample_id for response in own])
    assert schedule.piece_S is not None, "the schedule is new"
    micro_batch_s, piece_s = schedule.micro_batch_S[places], schedule.piece_S[places]
    order = np.argsort(piece_s, kind="stable")
    micro_batches = [
        make_token_batch(own, order[micro_batch_s[order] == m].tolist(), piece_s=piece_s)
        for m in range(schedule.num_micro_batches)
    ]
    batch = TrainingBatch(
        responses=own, micro_batches=micro_batches, schedule=schedule, demand=demand, plan=None, sent_bytes=sent_bytes
    ).following(planned)
    return batch if demand is None else _replaying_routes(batch, routes, policy)


def plan_recorded_routes(
    batch: TrainingBatch,
    recorded: Sequence[Tensor],
    policy: Policy,
    config: RunConfig,
    *,
    previous: Homes | None,
    cluster: Cluster,
) -> TrainingBatch:
    """Return the batch with routes that its own recompute pass recorded (R2), and a plan from them; collective.

    recorded   routes `[T, L, K]` of each micro-batch
    """
    responses = list(batch.responses)
    for micro_batch, experts_TLK in zip(batch.micro_batches, recorded, strict=True):
        start, prompt = 0, experts_TLK.numpy()[:0]
        for s, shared in zip(micro_batch.samples_B.tolist(), micro_batch.shared_B.tolist(), strict=True):
            end = start + len(responses[s].tokens_n) - 1 - shared
            own, start = experts_TLK[start:end].numpy(), end
            prompt = prompt if shared else own[: responses[s].prompt_length]
            responses[s] = replace(responses[s], experts_mLK=np.concatenate([prompt, own]) if shared else own)
    table, planned = gather_table(responses), None
    if not len(table.sample_id_S):
        return batch
    demand = count_demand(responses, table, batch.schedule, **_sizes(policy))
    if policy.balanced and not config.plan.live:  # responses are on their ranks already: the schedule stays
        model, unpacked = policy.model_shape, config.plan.model_copy(update={"pack": False})
        memory_gib = slot_memory(config, demand, cluster, model)
        planned = plan_together(demand, unpacked, cluster, model.expert, previous, memory_gib=memory_gib)
    return _replaying_routes(replace(batch, demand=demand).following(planned), _take_routes(responses), policy)


def _sizes(policy: Policy) -> dict[str, Any]:
    return {"num_experts": policy.num_experts, "layer_ids": policy.layer_ids, "top_k": policy.top_k}


def _take_routes(responses: list[Response]) -> dict[int, ndarray]:
    """Return the routes of responses by their position, and remove them from the responses."""
    routes = {s: one.experts_mLK for s, one in enumerate(responses) if one.experts_mLK is not None}
    responses[:] = [replace(one, experts_mLK=None) for one in responses]
    return routes


def _replaying_routes(batch: TrainingBatch, routes: dict[int, ndarray], policy: Policy) -> TrainingBatch:
    """Return the batch whose micro-batches replay routes.

    routes   of the responses, by position; those of a micro-batch leave memory once it has its copy
    """
    micro_batches, pairs_2 = list[TokenBatch](), np.zeros(2, dtype=np.int64)
    for micro_batch in batch.micro_batches:
        experts_B = [routes.pop(s) for s in micro_batch.samples_B.tolist()]
        pairs_2 += compare_prompts(micro_batch, experts_B)
        sizes: dict[str, Any] = {"num_experts": policy.num_experts, "layer_ids": policy.layer_ids}
        micro_batches.append(with_routes(micro_batch, experts_B, batch.responses, **sizes))
    pairs, differing = pairs_2.tolist()
    return replace(batch, micro_batches=micro_batches, prompt_pairs=(pairs, differing))


def current_homes(policy: Policy, topology: Topology) -> Homes | None:
    """Return where the experts are now; None where they cannot move."""
    if not policy.balanced:
        return None
    homes_LE = np.stack([layer.physical_to_logical_E for layer in balanced_layers(policy.trained).values()])
    return homes_at(homes_LE, policy, topology)


def homes_at(physical_to_logical_LE: Int[ndarray, "L E"], policy: Policy, topology: Topology) -> Homes:
    """Return the homes of a map, such as that of a plan."""
    return Homes(
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        layer_ids=np.array(policy.layer_ids, dtype=np.int32),
        physical_to_logical_map=physical_to_logical_LE.astype(np.int16),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchExecution:
    """Contexts of the micro-batches of a batch; call it with the number of one (`MicroBatchContext`).

    execution   runs micro-batches; None: they only replay their routes, if they have any
    live        live balancing of the model; None: there is none
    """

    model: nn.Module
    batch: TrainingBatch
    execution: PlanExecution | None = None
    live: LiveBalancing | None = None

    def __call__(self, number: int) -> AbstractContextManager[RoutingReplay | None]:
        """Return the context of the passes of a micro-batch; collective."""
        routes = self.batch.micro_batches[number].routes
        if self.execution is None:
            return replaying(self.model, routes)
        return self.execution.micro_batch(number, routes)

    @property
    def ran_at_home(self) -> int:
        """Return how often a micro-batch did not follow the plan, so far; the same on all ranks. 0 without a plan."""
        return 0 if self.execution is None else len(self.execution.ran_at_home)

    @property
    def planned_rows(self) -> tuple[int, int]:
        """Return the token-slots of all ranks so far that followed the plan, and that should have; 0 without one."""
        if self.execution is None or self.batch.plan is None or self.batch.demand is None:
            return 0, 0
        rows_M = self.batch.plan.scheduled(self.batch.demand).load_MLE.sum(axis=(1, 2))
        known, at_home = (int(rows_M[run].sum()) for run in (self.execution.followed, self.execution.ran_at_home))
        return known, known + at_home


@contextmanager
def executing(
    policy: Policy, batch: TrainingBatch, settings: PlanSettings, cluster: Cluster, numbers: Sequence[int] | None = None
) -> Iterator[BatchExecution]:
    """Yield the contexts of the micro-batches: the plan, the replay of their routes, or neither; collective.

    Without a plan, layers of a balanced policy balance live inside.

    numbers   of the micro-batches that will run, in their order; None: all
    """
    model = policy.trained
    if batch.plan is not None and batch.demand is not None:
        numbers = range(len(batch.micro_batches)) if numbers is None else numbers
        routes = {m: batch.micro_batches[m].routes for m in numbers}
        with execute_plan(model, batch.plan, batch.demand, sums=settings.sums, routes=routes) as execution:
            yield BatchExecution(model=model, batch=batch, execution=execution)
    else:
        with balancing(model, settings, cluster) as live:
            yield BatchExecution(model=model, batch=batch, live=live)


def balancing(
    model: nn.Module, settings: PlanSettings, cluster: Cluster
) -> AbstractContextManager[LiveBalancing | None]:
    """Return a context that balances a model live; it yields None for a model without balanced layers. Collective."""
    if not is_balanced(model):
        return nullcontext()
    return balance_live(
        model,
        slots=0 if settings.balancer == "static" else settings.live_slots,
        ranks_per_node=cluster.ranks_per_node,
        tolerance=settings.tolerance,
        sums=settings.sums,
        dispatch=cluster.dispatch,
    )


def replaying(model: nn.Module, routes: BatchRoutes | None) -> AbstractContextManager[RoutingReplay | None]:
    """Return a context that replays routes; without routes it does nothing."""
    return nullcontext() if routes is None else replay_routing(model, routes)
