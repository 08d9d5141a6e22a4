"""The plan of a step: mini-batches and schedule of all responses, demand counted from their routes, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.balancers.resident_number import may_take_fewer
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import relocation_seconds
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.prediction import predict
from relibra.planning.layer_shards import demand_of_layers, join_layers, layers_of_rank
from relibra.planning.placement import Homes
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step, settle_resident_slots
from relibra.planning.validation import check_memory
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.batch.schedule import Schedule, draw_unit_order, make_schedule
from relibra.rl.config.settings import PlanSettings, UpdateSettings
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import gather_arrays, gather_json, gather_several, sum_over_ranks
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots
from relibra.routing.statistics import count_pairs

_PAIR_TOKENS = 1 << 14
"""Most tokens whose pairs of experts one rank counts: 48 layers of 8 choices take about 0.1 s."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseTable:
    """Responses of all ranks in a step, by sample id; the same on all ranks.

    tokens_S   tokens fed in training: all but the last
    """

    sample_id_S: Int64[ndarray, " S"]
    group_id_S: Int64[ndarray, " S"]
    tokens_S: Int64[ndarray, " S"]

    def index_of(self, sample_ids: Sequence[int]) -> Int64[ndarray, " s"]:
        """Return the rows of samples."""
        return np.searchsorted(self.sample_id_S, np.asarray(sample_ids, dtype=np.int64))


def gather_table(responses: Sequence[Response]) -> ResponseTable:
    """Return the table of the responses of all ranks; collective."""
    own = [(response.sample_id, response.group_id, len(response.tokens_n) - 1) for response in responses]
    rows = np.concatenate(gather_arrays(np.array(own, dtype=np.int64).reshape(-1, 3)))
    order = np.argsort(rows[:, 0], kind="stable")
    return ResponseTable(sample_id_S=rows[order, 0], group_id_S=rows[order, 1], tokens_S=rows[order, 2])


def make_step_schedule(table: ResponseTable, update: UpdateSettings, *, by_group: bool, seed: int) -> Schedule:
    """Assign the responses of a step to mini-batches at random, and inside them by length; the same on all ranks.

    In the order of samples, unfinished responses of earlier steps would always be in the first mini-batches (T-PPO).

    by_group   keep groups together in a mini-batch
    """
    return make_schedule(
        table.tokens_S,
        draw_unit_order(table.sample_id_S, table.group_id_S, by_group=by_group, seed=seed),
        mini_batches=update.mini_batches,
        micro_batch_tokens=update.micro_batch_tokens,
        num_ranks=dist.get_world_size(),
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

    responses   of this rank, with validated routes
    """
    counts_sLE = np.zeros((len(responses), len(layer_ids), num_experts), dtype=np.int32)
    for s, response in enumerate(responses):
        assert response.experts_mLK is not None, f"sample {response.sample_id} has no routes"
        rows = len(response.experts_mLK)
        [counts_sLE[s]] = count_token_slots(
            response.experts_mLK, np.ones(rows, dtype=bool), np.array([0, rows]), num_experts
        )
    own_ids = np.array([response.sample_id for response in responses], dtype=np.int64)
    counts_SLE, ids_S = (np.concatenate(pieces) for pieces in zip(*gather_several([counts_sLE, own_ids]), strict=True))
    demand = Demand(
        counts_SLE=counts_SLE[np.argsort(ids_S, kind="stable")],
        layer_ids=np.array(layer_ids, dtype=np.int32),
        sample_ids=table.sample_id_S,
        pairs_LEE=_count_pairs(responses, num_experts, len(layer_ids)),
        top_k=top_k,
    )
    scheduled = demand.with_schedule(
        schedule.micro_batch_S, schedule.rank_S, dist.get_world_size(), schedule.num_micro_batches
    )
    return replace(scheduled, group_M=schedule.mini_batch_M)


def _count_pairs(responses: Sequence[Response], num_experts: int, num_layers: int) -> Int64[ndarray, "L E E"]:
    """Estimate how many tokens of the step pick two experts together (`statistics.count_pairs`); collective.

    Every rank counts evenly spaced tokens of its responses, at most `_PAIR_TOKENS`, and scales the counts up: the pairs
    only say how often two choices of a token go to the same rank.
    """
    pairs_LEE = np.zeros((num_layers, num_experts, num_experts), dtype=np.int64)
    stride = max(1, -(-sum(len(response.tokens_n) - 1 for response in responses) // _PAIR_TOKENS))
    for response in responses:
        assert response.experts_mLK is not None, f"sample {response.sample_id} has no routes"
        counted = response.experts_mLK[::stride]
        pairs_LEE += stride * count_pairs(counted, np.ones(len(counted), dtype=bool), num_experts)
    return sum_over_ranks(torch.from_numpy(pairs_LEE)).numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """The plan of a step, and what it is compared with.

    static_seconds   modelled seconds of the same schedule with every expert at its static home, no replicas and no
                     moves; the plan's own are in `StepPlan.predicted`
    """

    plan: StepPlan
    static_seconds: float


def plan_together(
    demand: ScheduledDemand,
    settings: PlanSettings,
    cluster: Cluster,
    expert: ExpertShape,
    previous: Homes | None,
    *,
    rank_tokens: int | None = None,
) -> PlannedStep:
    """Return the plan of a step, the same on all ranks; each rank plans a part of the layers. Collective.

    Where samples are packed, one schedule is for all layers: rank 0 plans them all.

    expert        size of one expert of the model
    previous      where the experts are now; None: in the static layout
    rank_tokens   most tokens of a rank in a micro-batch, which packing keeps; None: as many as the schedule has
    """
    budget = replace(plan_budget(settings, cluster), rank_tokens=rank_tokens)
    budget = budget.with_resident_slots(expert, len(demand.layer_ids))
    L, R = len(demand.layer_ids), cluster.num_ranks
    if budget.pack_samples and cluster.num_nodes > 1:
        layers_R = [np.arange(L if rank == 0 else 0) for rank in range(R)]
    else:
        budget = replace(budget, pack_samples=False, place_samples=False)
        if settings.balancer == "relibra" and may_take_fewer(budget, demand):
            budget = _with_settled_slots(demand, cluster, budget, expert, previous)
        layers_R = [layers_of_rank(L, rank, R) for rank in range(R)]
    part, static_seconds, layers = None, 0.0, layers_R[dist.get_rank()]
    if len(layers):
        own = demand_of_layers(demand, layers)
        homes = None if previous is None else previous.of_layers(layers)
        part = plan_step(own, cluster, budget, settings.balancer, expert=expert, previous=homes)
        static_seconds = predict(
            StepPlan.static(own, cluster.topology, dispatch=cluster.dispatch), own, cluster, expert
        ).total
    planned = _gather_parts(part, static_seconds, layers_R, demand, cluster, settings)
    check_memory(planned.plan, cluster.memory_bytes, expert)  # each part was checked with its own layers
    return _with_moves_together(planned, cluster, expert)


def _with_settled_slots(
    demand: ScheduledDemand, cluster: Cluster, budget: Budget, expert: ExpertShape, previous: Homes | None
) -> Budget:
    """Return the budget with the resident slots that rank 0 finds cheapest, as many in all parts. Collective."""
    number_1 = np.zeros(0, dtype=np.int64)
    if dist.get_rank() == 0:
        settled = settle_resident_slots(demand, cluster, budget, expert=expert, previous=previous)
        number_1 = np.array([settled.resident_slots], dtype=np.int64)
    number = int(gather_arrays(number_1)[0][0])
    return replace(budget, resident_slots=number, fewer_resident=False)


def _with_moves_together(planned: PlannedStep, cluster: Cluster, expert: ExpertShape) -> PlannedStep:
    """Return the plan with the seconds of all moves at once: the busiest link of a part is not that of all parts."""
    plan = planned.plan
    moves = relocation_seconds(plan.previous, plan, cluster, expert)
    total = plan.predicted["total"] - plan.predicted["relocation"] + moves
    return replace(planned, plan=replace(plan, predicted={**plan.predicted, "relocation": moves, "total": total}))


def _gather_parts(
    part: StepPlan | None,
    static_seconds: float,
    layers_R: Sequence[Int64[ndarray, " l"]],
    demand: ScheduledDemand,
    cluster: Cluster,
    settings: PlanSettings,
) -> PlannedStep:
    """Return the plan of all layers, joined from the parts of all ranks; seconds are sums over parts. Collective."""
    M, _, R, E = demand.tokens_MLRE.shape
    arrays: dict[str, ndarray] = {
        "micro_batch_S": np.zeros(0, dtype=np.int32),
        "rank_S": np.zeros(0, dtype=np.int32),
        "physical_to_logical_map": np.zeros((0, E), dtype=np.int16),
        "previous_map": np.zeros((0, E), dtype=np.int16),
        "replica_MLRB": np.zeros((M, 0, R, settings.slots), dtype=np.int16),
        "quota_MLRB": np.zeros((M, 0, R, settings.slots), dtype=np.int32),
        "bound_ML": np.zeros((M, 0), dtype=np.int64),
    }
    facts: list[Any] = []
    if part is not None:
        arrays = {name: getattr(part, name) for name in arrays}
        facts = [part.balancer, part.resident_slots, part.scope, part.plan_seconds, dict(part.predicted)]
    gathered = gather_several(list(arrays.values()))
    facts_R = gather_json([static_seconds, *facts])
    parts = []
    for rank in range(R):
        if len(facts_R[rank]) == 1:
            continue
        balancer, resident_slots, scope, seconds, predicted = facts_R[rank][1:]
        of_layers: dict[str, Any] = dict(zip(arrays, gathered[rank], strict=True))
        parts.append(
            StepPlan(
                balancer=balancer,
                num_nodes=cluster.num_nodes,
                ranks_per_node=cluster.ranks_per_node,
                layer_ids=demand.layer_ids[layers_R[rank]],
                group_M=demand.group_M,
                resident_slots=resident_slots,
                scope=scope,
                dispatch=cluster.dispatch,
                static_rows=settings.static_rows,
                predicted=predicted,
                plan_seconds=seconds,
                objective=settings.objective,
                **of_layers,
            )
        )
    predicted = {name: sum(part.predicted[name] for part in parts) for name in parts[0].predicted}
    plan = replace(join_layers(parts, demand), predicted=predicted)
    return PlannedStep(plan=plan, static_seconds=sum(static for static, *_ in facts_R))
