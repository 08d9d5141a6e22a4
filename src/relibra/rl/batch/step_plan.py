"""The plan in the loop: when a rollout is done, its routes say what every expert will have to do; plan from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster, cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.layer_shards import demand_of_layers, join_layers, layers_of_rank, plan_of_layers
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.rl.batch.schedule import Schedule, make_schedule
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import gather_arrays, gather_json, gather_several
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.trace import RoutingTrace

_LOT_STREAM = 5
"""Random stream of the lots that deal responses to mini-batches, apart from those of prompts and slips."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseTable:
    """What every rank knows of all responses of a step, by sample id.

    sample_id_S, group_id_S   which they are
    tokens_S                  fed in training: all but the last
    """

    sample_id_S: Int64[ndarray, " S"]
    group_id_S: Int64[ndarray, " S"]
    tokens_S: Int64[ndarray, " S"]

    def place_of(self, sample_ids: Sequence[int]) -> Int64[ndarray, " s"]:
        """Return where samples stand in the table."""
        return np.searchsorted(self.sample_id_S, np.asarray(sample_ids, dtype=np.int64))


def tabulate(responses: Sequence[Response]) -> ResponseTable:
    """Tell every rank of the responses of all; collective."""
    own = [(response.sample_id, response.group_id, len(response.tokens_n) - 1) for response in responses]
    rows = np.concatenate(gather_arrays(np.array(own, dtype=np.int64).reshape(-1, 3)))
    order = np.argsort(rows[:, 0], kind="stable")
    return ResponseTable(sample_id_S=rows[order, 0], group_id_S=rows[order, 1], tokens_S=rows[order, 2])


def schedule_of(table: ResponseTable, config: RunConfig) -> Schedule:
    """Deal the responses of a step to mini-batches, by lot, and inside them by length; the same on all ranks.

    By number, responses that go on would always be in the first mini-batches (T-PPO).
    """
    return make_schedule(
        table.tokens_S,
        _lots(table, config),
        mini_batches=config.update.mini_batches,
        micro_batch_tokens=config.update.micro_batch_tokens,
        num_ranks=dist.get_world_size(),
    )


def own_mini_batches(responses: Sequence[Response], config: RunConfig) -> list[Int64[ndarray, " _"]]:
    """Deal responses of all ranks to mini-batches by the lot of `schedule_of`; return this rank's places; collective.

    Which responses share a mini-batch does not depend on who holds them.
    """
    table = tabulate(responses)
    lot_S = _lots(table, config)
    own_s = lot_S[table.place_of([response.sample_id for response in responses])]
    parts = np.array_split(np.arange(len(np.unique(lot_S))), config.update.mini_batches)
    return [np.flatnonzero(np.isin(own_s, part)) for part in parts]


def _lots(table: ResponseTable, config: RunConfig) -> Int64[ndarray, " S"]:
    """Draw the number of each response's unit, its group or itself, in the order that mini-batches are filled in."""
    by_group = config.algorithm.advantage == "group"
    units, unit_S = np.unique(table.group_id_S if by_group else table.sample_id_S, return_inverse=True)
    newest = int(table.sample_id_S.max(initial=0))  # other steps hardly ever have the same
    lot_X = np.random.default_rng([config.run.seed, _LOT_STREAM, newest]).permutation(len(units))
    return lot_X[unit_S]


def demand_of(
    trace: RoutingTrace | None, table: ResponseTable, schedule: Schedule, model_LE: tuple[int, int]
) -> ScheduledDemand:
    """Count the routes of all ranks and put them under a schedule; collective.

    trace      routes of this rank's responses; None: it has none
    model_LE   MoE layers and experts
    """
    counts_sLE = np.zeros((0, *model_LE), dtype=np.int32)
    own_ids = np.zeros(0, dtype=np.int64)
    if trace is not None:
        own = Demand.from_trace(trace)
        counts_sLE, own_ids = own.counts_SLE, own.sample_ids.astype(np.int64)
    own_layers = np.array([] if trace is None else trace.layer_ids, dtype=np.int64)
    counts_SLE, ids_S, layer_ids = (
        np.concatenate(pieces) for pieces in zip(*gather_several([counts_sLE, own_ids, own_layers]), strict=True)
    )
    order = np.argsort(ids_S, kind="stable")
    demand = Demand(
        counts_SLE=counts_SLE[order], layer_ids=layer_ids[: model_LE[0]].astype(np.int32), sample_ids=table.sample_id_S
    )
    scheduled = demand.with_schedule(
        schedule.micro_batch_S, schedule.rank_S, dist.get_world_size(), schedule.num_micro_batches
    )
    return replace(scheduled, group_M=schedule.mini_batch_M)


def plan_together(
    demand: ScheduledDemand, config: RunConfig, ranks_per_node: int, previous: StepPlan | None
) -> StepPlan:
    """Plan a step, each rank some of the layers; the same plan on all ranks; collective.

    Where several nodes share the step, the schedule is decided first, on rank 0, from all layers.

    previous   plan of the step before; None: experts are where the static layout has them
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cluster = cluster_preset("h100x8", num_ranks, ranks_per_node)
    settings = config.plan
    may_pack = settings.pack and settings.sums == "fast"
    budget = Budget(
        slots=settings.slots,
        objective="tokens",
        move_homes=settings.move_homes,
        pack_samples=may_pack,
        place_samples=may_pack,
        tolerance=settings.tolerance,
    )
    if may_pack and cluster.num_nodes > 1:
        demand = _with_packed_schedule(demand, cluster, budget, config, previous)
    budget = replace(budget, pack_samples=False, place_samples=False)
    layers = layers_of_rank(len(demand.layer_ids), rank, num_ranks)
    part = None
    if len(layers):
        part = plan_step(
            demand_of_layers(demand, layers),
            cluster,
            budget,
            settings.balancer,
            previous=None if previous is None else plan_of_layers(previous, layers),
        )
    return _gather_parts(part, demand, cluster, settings.slots)


def _with_packed_schedule(
    demand: ScheduledDemand, cluster: Cluster, budget: Budget, config: RunConfig, previous: StepPlan | None
) -> ScheduledDemand:
    schedule_2S = np.zeros((0, len(demand.sample_ids)), dtype=np.int32)
    if dist.get_rank() == 0:
        plan = plan_step(demand, cluster, budget, config.plan.balancer, previous=previous)
        schedule_2S = np.stack([plan.micro_batch_S, plan.rank_S])
    micro_batch_S, rank_S = gather_arrays(schedule_2S)[0]
    return demand.with_schedule(micro_batch_S, rank_S, cluster.num_ranks, len(demand.tokens_MLRE))


def _gather_parts(part: StepPlan | None, demand: ScheduledDemand, cluster: Cluster, slots: int) -> StepPlan:
    """Give every rank the parts of all, and join them."""
    (M, _, R, E), layers = demand.tokens_MLRE.shape, np.arange(len(demand.layer_ids))
    told: dict[str, ndarray] = {
        "physical_to_logical_map": np.zeros((0, E), dtype=np.int16),
        "previous_map": np.zeros((0, E), dtype=np.int16),
        "replica_MLRB": np.zeros((M, 0, R, slots), dtype=np.int16),
        "quota_MLRB": np.zeros((M, 0, R, slots), dtype=np.int32),
        "bound_ML": np.zeros((M, 0), dtype=np.int64),
    }
    about: list[Any] = []
    if part is not None:
        told = {name: getattr(part, name) for name in told}
        about = [part.balancer, part.resident, part.scope, part.plan_seconds]
    gathered = gather_several(list(told.values()))
    about_R = gather_json(about)
    parts = []
    for rank in range(R):
        if not about_R[rank]:
            continue
        balancer, resident, scope, seconds = about_R[rank]
        of = dict(zip(told, gathered[rank], strict=True))
        parts.append(
            StepPlan(
                balancer=balancer,
                num_nodes=cluster.num_nodes,
                ranks_per_node=cluster.ranks_per_node,
                layer_ids=demand.layer_ids[layers_of_rank(len(layers), rank, R)],
                micro_batch_S=demand.micro_batch_S,
                rank_S=demand.rank_S,
                resident=resident,
                scope=scope,
                plan_seconds=seconds,
                objective="tokens",
                physical_to_logical_map=of["physical_to_logical_map"],
                previous_map=of["previous_map"],
                replica_MLRB=of["replica_MLRB"],
                quota_MLRB=of["quota_MLRB"],
                bound_ML=of["bound_ML"],
            )
        )
    return join_layers(parts, demand)
