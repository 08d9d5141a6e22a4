"""The plan of a step: mini-batches and schedule of all responses, demand counted from their routes, and the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from numpy import ndarray
from safetensors.numpy import load, save

from relibra.cluster import Cluster
from relibra.planning.balancers.lasting import Residents
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.prediction import predict
from relibra.planning.placement import Homes
from relibra.planning.plan import StepPlan
from relibra.planning.plan_files import plan_from_tensors, plan_to_tensors
from relibra.planning.planner import choose_residents, plan_step
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.batch.schedule import Schedule, draw_unit_order, make_schedule, prompts_of
from relibra.rl.config.settings import PlanSettings, UpdateSettings
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import broadcast_bytes, broadcast_json, gather_arrays, gather_several, sum_over_ranks
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots
from relibra.routing.statistics import count_pairs
from relibra.routing.synthetic import demo_demand

_log = logging.getLogger(__name__)
_PAIR_TOKENS = 1 << 14
"""Most tokens whose pairs of experts one rank counts: 48 layers of 8 choices take about 0.1 s."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseTable:
    """Responses of all ranks in a step, by sample id; the same on all ranks.

    tokens_S    tokens fed in training: all but the last
    prompt_S    tokens of its prompt
    version_S   of the weights that sampled its last token, and recorded its routes
    """

    sample_id_S: Int64[ndarray, " S"]
    group_id_S: Int64[ndarray, " S"]
    tokens_S: Int64[ndarray, " S"]
    prompt_S: Int64[ndarray, " S"]
    version_S: Int64[ndarray, " S"]

    def index_of(self, sample_ids: Sequence[int]) -> Int64[ndarray, " s"]:
        """Return the rows of samples."""
        return np.searchsorted(self.sample_id_S, np.asarray(sample_ids, dtype=np.int64))


def gather_table(responses: Sequence[Response]) -> ResponseTable:
    """Return the table of the responses of all ranks; collective."""
    own = [
        (one.sample_id, one.group_id, len(one.tokens_n) - 1, one.prompt_length, one.versions_r[-1]) for one in responses
    ]
    rows = np.concatenate(gather_arrays(np.array(own, dtype=np.int64).reshape(-1, 5)))
    columns = rows[np.argsort(rows[:, 0], kind="stable")].T
    names = ("sample_id_S", "group_id_S", "tokens_S", "prompt_S", "version_S")
    return ResponseTable(**dict(zip(names, columns, strict=True)))


def make_step_schedule(
    table: ResponseTable, update: UpdateSettings, *, by_group: bool, seed: int, shares_prompts: bool = False
) -> Schedule:
    """Assign the responses of a step to mini-batches at random, and inside them by length; the same on all ranks.

    In the order of samples, unfinished responses of earlier steps would always be in the first mini-batches (T-PPO).

    by_group         keep groups together in a mini-batch
    shares_prompts   responses of a group that are trained together feed their prompt once
    """
    return make_schedule(
        table.tokens_S,
        draw_unit_order(table.sample_id_S, table.group_id_S, by_group=by_group, seed=seed),
        mini_batches=update.mini_batches,
        micro_batch_tokens=update.micro_batch_tokens,
        num_ranks=dist.get_world_size(),
        prompts=prompts_of(table.group_id_S, table.version_S, table.prompt_S) if shares_prompts else None,
    )


def own_mini_batches(
    responses: Sequence[Response], mini_batches: int, *, by_group: bool, seed: int
) -> list[Int64[ndarray, " _"]]:
    """Assign responses of all ranks to mini-batches as `make_step_schedule` does; collective.

    Which responses share a mini-batch does not depend on the ranks that hold them.

    returns   indices of this rank's responses per mini-batch
    """
    table = gather_table(responses)
    unit_S = draw_unit_order(table.sample_id_S, table.group_id_S, by_group=by_group, seed=seed)
    own_s = unit_S[table.index_of([response.sample_id for response in responses])]
    parts = np.array_split(np.arange(len(np.unique(unit_S))), mini_batches)
    return [np.flatnonzero(np.isin(own_s, part)) for part in parts]


def count_demand(
    responses: Sequence[Response],
    table: ResponseTable,
    schedule: Schedule,
    *,
    num_experts: int,
    layer_ids: Sequence[int],
    top_k: int,
) -> ScheduledDemand:
    """Count the routes of the responses of all ranks, and apply the schedule; collective.

    A prompt that responses share is counted with the first of them.

    responses   of this rank, with validated routes
    """
    shared_S = np.where(schedule.leads_S, 0, table.prompt_S)
    own_ids = np.array([response.sample_id for response in responses], dtype=np.int64)
    own_shared = shared_S[table.index_of(own_ids.tolist())].tolist()
    fed = [routes_of(one)[first:] for one, first in zip(responses, own_shared, strict=True)]
    counts_sLE = np.zeros((len(responses), len(layer_ids), num_experts), dtype=np.int32)
    for s, experts_mLK in enumerate(fed):
        rows = len(experts_mLK)
        [counts_sLE[s]] = count_token_slots(experts_mLK, np.ones(rows, dtype=bool), np.array([0, rows]), num_experts)
    counts_SLE, ids_S = (np.concatenate(pieces) for pieces in zip(*gather_several([counts_sLE, own_ids]), strict=True))
    demand = Demand(
        counts_SLE=counts_SLE[np.argsort(ids_S, kind="stable")],
        layer_ids=np.array(layer_ids, dtype=np.int32),
        sample_ids=table.sample_id_S,
        pairs_LEE=_count_pairs(fed, num_experts, len(layer_ids)),
        top_k=top_k,
        attended_S=table.tokens_S**2 - shared_S**2 if shared_S.any() else None,
        piece_S=schedule.piece_S if shared_S.any() else None,
    )
    scheduled = demand.with_schedule(
        schedule.micro_batch_S, schedule.rank_S, dist.get_world_size(), schedule.num_micro_batches
    )
    return replace(scheduled, group_M=schedule.mini_batch_M)


def routes_of(response: Response) -> ndarray:
    """Return the routes `[m, L, K]` of a response that has some."""
    assert response.experts_mLK is not None, f"sample {response.sample_id} has no routes"
    return response.experts_mLK


def _count_pairs(fed: Sequence[ndarray], num_experts: int, num_layers: int) -> Int64[ndarray, "L E E"]:
    """Estimate how many tokens of the step pick two experts together (`statistics.count_pairs`); collective.

    Every rank counts evenly spaced tokens of its responses, at most `_PAIR_TOKENS`, and scales the counts up: the pairs
    only say how often two choices of a token go to the same rank.

    fed   routes `[m, L, K]` of responses
    """
    pairs_LEE = np.zeros((num_layers, num_experts, num_experts), dtype=np.int64)
    stride = max(1, -(-sum(map(len, fed)) // _PAIR_TOKENS))
    for experts_mLK in fed:
        counted = experts_mLK[::stride]
        pairs_LEE += stride * count_pairs(counted, np.ones(len(counted), dtype=bool), num_experts)
    return sum_over_ranks(torch.from_numpy(pairs_LEE)).numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """The plan of a step, and what it is compared with.

    lasting          on rank 0, with `plan.lasting`: replicas of the next step, chosen in a thread while this one trains
    static_seconds   modelled seconds of the same schedule with every expert at its static home, no replicas and no
                     moves; the plan's own are in `StepPlan.predicted`
    """

    plan: StepPlan
    static_seconds: float
    lasting: Future[Residents | None] | None = None


def plan_together(
    demand: ScheduledDemand,
    settings: PlanSettings,
    cluster: Cluster,
    expert: ExpertShape,
    previous: Homes | None,
    *,
    memory_gib: float,
    rank_tokens: int | None = None,
) -> PlannedStep:
    """Return the plan of a step, the same on all ranks: rank 0 plans, and the others get its arrays. Collective.

    expert        size of one expert of the model
    previous      where the experts are now, and replicas that last, if any were chosen; None: in the static layout
    memory_gib    most for slots; the settings may allow less
    rank_tokens   most tokens of a rank in a micro-batch, which packing keeps to; None: as many as the schedule has
    """
    plan, static_seconds, lasting = None, 0.0, None
    if dist.get_rank() == 0:
        budget = replace(plan_budget(settings, memory_gib), rank_tokens=rank_tokens)
        residents = previous if isinstance(previous, Residents) and settings.lasting else None
        plan = plan_step(
            demand, cluster, budget, settings.balancer, expert=expert, previous=previous, residents=residents
        )
        if settings.lasting:
            lasting = _in_thread(partial(choose_residents, plan, demand, cluster, budget, expert=expert))
        static = StepPlan.static(demand, cluster.topology, dispatch=cluster.dispatch)
        static_seconds = predict(static, demand, cluster, expert).total
    arrays, facts = ({}, {}) if plan is None else plan_to_tensors(plan)
    packed = broadcast_bytes(save(arrays))
    static_seconds, facts = broadcast_json([static_seconds, facts])
    return PlannedStep(
        plan=plan or plan_from_tensors("the plan of rank 0", load(packed), facts),
        static_seconds=static_seconds,
        lasting=lasting,
    )


def try_balancer(settings: PlanSettings, cluster: Cluster, num_experts: int) -> None:
    """Plan a made-up step, so that a wrong function of the user ends the run before its first step."""
    demand = demo_demand(cluster.num_ranks, rank_tokens=64, num_experts=num_experts)
    plan_step(demand, cluster, plan_budget(settings, 1.0), settings.balancer)


def _in_thread(choose: Callable[[], Residents | None]) -> Future[Residents | None]:
    """Return what a thread will choose; it does not keep the process from ending."""
    future: Future[Residents | None] = Future()

    def run() -> None:
        try:
            future.set_result(choose())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            future.set_exception(error)

    Thread(target=run, name="planner", daemon=True).start()
    return future


def exchange_residents(lasting: Future[Residents | None] | None) -> list | None:
    """Return the experts `[L][R][B]` in lasting slots, chosen on rank 0, on all ranks; None: none. Collective.

    Where they cannot be chosen, a warning says why: this step stands, and the next one is planned without them.
    """
    chosen = None
    if lasting is not None:
        try:
            chosen = lasting.result()
        except Exception:  # noqa: BLE001 - of the planner's thread
            _log.warning(
                "plan.lasting: no replicas could be chosen for the next step, which is planned whole", exc_info=True
            )
    return broadcast_json(None if chosen is None else chosen.replica_LRB.tolist())
