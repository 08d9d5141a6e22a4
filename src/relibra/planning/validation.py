"""Check a plan against the machine and the load, independently of solver code.

Checked is what the executor needs: every expert has one home, every replica its own slot on a rank without its expert,
every token-slot is computed exactly once, and no busiest rank is below the bound; samples stay in their group, and
ranks within limits and memory where these are given.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from relibra.cluster import Topology
from relibra.errors import PlanError
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand, ScheduledDemand


def validate_plan(
    plan: StepPlan,
    topology: Topology,
    demand: Demand,
    *,
    rank_tokens: int | None = None,
    rank_attention: int | None = None,
    memory_bytes: int | None = None,
    expert: ExpertShape | None = None,
) -> None:
    """Raise PlanError at the first rule that a plan breaks.

    topology         nodes and ranks per node of the machine
    demand           of the step; the schedule of the plan is used. If it has a schedule with groups of micro-batches
                     (`group_M`: mini-batches, expert-data-parallel groups), samples must stay in their group
    rank_tokens      most tokens (`Demand.length_S`) of a rank in a micro-batch; a longer sample must be alone there.
                     None: not checked
    rank_attention   the same for attention, the sum of squared lengths
    memory_bytes     memory of a rank, which slots must fit; checked if the shape of an expert is given too
    """
    _check_sizes(plan, topology, demand)
    _check_schedule(plan, demand)
    _check_groups(plan, demand)
    _check_rank_limit(plan, demand, 1, "tokens", rank_tokens)
    _check_rank_limit(plan, demand, 2, "squared tokens, the cost of attention,", rank_attention)
    if memory_bytes is not None and expert is not None:
        check_memory(plan, memory_bytes, expert)
    _check_homes(plan)
    _check_replicas(plan)
    load_MLR = _check_quotas(plan, demand)
    if (load_MLR.max(axis=2, initial=0) < plan.bound_ML).any():
        m, layer = np.argwhere(load_MLR.max(axis=2) < plan.bound_ML)[0].tolist()
        raise PlanError(f"{_where(plan, layer, m)}: the busiest rank is below the plan's bound, so the bound is wrong")


def _check_sizes(plan: StepPlan, topology: Topology, demand: Demand) -> None:
    if plan.topology != topology:
        raise PlanError(
            f"the plan is for {plan.num_nodes} nodes of {plan.ranks_per_node} ranks, the machine has "
            f"{topology.num_nodes} of {topology.ranks_per_node}: plan again"
        )
    S, L, E = demand.counts_SLE.shape
    M, R = plan.bound_ML.shape[0], plan.num_ranks
    if plan.replica_MLRB.ndim != 4:
        raise PlanError(f"plan array replica_MLRB has shape {plan.replica_MLRB.shape}: expected 4 axes")
    shapes = {
        "layer_ids": (L,),
        "micro_batch_S": (S,),
        "rank_S": (S,),
        "physical_to_logical_map": (L, E),
        "previous_map": (L, E),
        "replica_MLRB": (M, L, R, plan.slots),
        "quota_MLRB": (M, L, R, plan.slots),
        "bound_ML": (M, L),
    }
    for name, shape in shapes.items():
        if not np.issubdtype(getattr(plan, name).dtype, np.integer):
            raise PlanError(f"plan array {name} holds {getattr(plan, name).dtype}: expected whole numbers")
        if getattr(plan, name).shape != shape:
            raise PlanError(f"plan array {name} has shape {getattr(plan, name).shape}: {shape} fits demand and machine")
    if not np.array_equal(plan.layer_ids, demand.layer_ids):
        raise PlanError("layers of plan and demand differ: the plan was made for another model")
    if E % R:
        raise PlanError(f"{E} experts cannot be divided evenly among {R} ranks: use a number of ranks that divides {E}")


def _check_schedule(plan: StepPlan, demand: Demand) -> None:
    M = plan.bound_ML.shape[0]
    if len(plan.micro_batch_S) and not -1 <= plan.micro_batch_S.min() <= plan.micro_batch_S.max() < M:
        raise PlanError(f"the schedule names micro-batches outside -1..{M - 1}")
    kept = plan.micro_batch_S >= 0
    if kept.any() and not 0 <= plan.rank_S[kept].min() <= plan.rank_S[kept].max() < plan.num_ranks:
        raise PlanError(f"the schedule names ranks outside 0..{plan.num_ranks - 1}")
    if isinstance(demand, ScheduledDemand) and not np.array_equal(kept, demand.micro_batch_S >= 0):
        s = int(np.flatnonzero(kept != (demand.micro_batch_S >= 0))[0])
        raise PlanError(f"sample {demand.sample_ids[s]} is in the plan or in the demand's schedule, but not in both")


def _check_groups(plan: StepPlan, demand: Demand) -> None:
    """Compare the group of each sample under the plan's schedule and under the demand's."""
    if not isinstance(demand, ScheduledDemand) or demand.group_M is None:
        return
    if len(demand.group_M) != len(plan.bound_ML):
        raise PlanError(
            f"the plan has {len(plan.bound_ML)} micro-batches, the demand {len(demand.group_M)}: plan again"
        )
    if plan.group_M is not None and not np.array_equal(plan.group_M, demand.group_M):
        m = int(np.flatnonzero(plan.group_M != demand.group_M)[0])
        raise PlanError(
            f"micro-batch {m} is in group {plan.group_M[m]} of the plan, in {demand.group_M[m]} of the demand"
        )
    for s in np.flatnonzero(plan.micro_batch_S >= 0):
        before, after = demand.group_M[demand.micro_batch_S[s]], demand.group_M[plan.micro_batch_S[s]]
        if before != after:
            raise PlanError(
                f"sample {demand.sample_ids[s]} moves from group {before} of micro-batches to group {after}: it must "
                "stay in its mini-batch or expert-data-parallel group"
            )


def _check_rank_limit(plan: StepPlan, demand: Demand, power: int, what: str, most: int | None) -> None:
    """Add up the samples of each rank and micro-batch one by one; a single sample may exceed the limit."""
    if most is None:
        return
    total, samples = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    cost_S = demand.length_S if power == 1 else demand.attention_S
    for m, rank, cost in zip(plan.micro_batch_S.tolist(), plan.rank_S.tolist(), cost_S.tolist(), strict=True):
        if m >= 0:
            total[m, rank] += cost
            samples[m, rank] += 1
    for (m, rank), amount in sorted(total.items()):
        if amount > most and samples[m, rank] > 1:
            raise PlanError(
                f"micro-batch {m}: rank {rank} has {amount:,} {what} in {samples[m, rank]} samples, allowed are "
                f"{most:,}: schedule fewer samples on it"
            )


def check_memory(plan: StepPlan, memory_bytes: int, expert: ExpertShape) -> None:
    """Raise PlanError if the slots of a rank, weights and gradients, take more than its memory."""
    experts = plan.slots * (len(plan.layer_ids) if plan.resident else 1) if (plan.replica_MLRB >= 0).any() else 0
    needed = experts * (expert.weight_bytes + expert.gradient_bytes)
    if needed > memory_bytes:
        raise PlanError(
            f"replica slots for {experts} experts take {needed / 1e9:.3g} GB on every rank, which has "
            f"{memory_bytes / 1e9:.3g} GB: plan with fewer slots"
        )


def _check_homes(plan: StepPlan) -> None:
    for name in ("physical_to_logical_map", "previous_map"):
        ordered_LE = np.sort(getattr(plan, name), axis=1)
        wrong_L = (ordered_LE != np.arange(plan.num_experts)).any(axis=1)
        if wrong_L.any():
            layer = plan.layer_ids[np.argmax(wrong_L)]
            raise PlanError(f"layer {layer}: {name} does not give every expert exactly one home slot")


def _check_replicas(plan: StepPlan) -> None:
    per_rank = plan.num_experts // plan.num_ranks
    if ((plan.replica_MLRB < -1) | (plan.replica_MLRB >= plan.num_experts)).any():
        raise PlanError(f"a replica names an expert outside 0..{plan.num_experts - 1} (or -1, an empty slot)")
    if ((plan.quota_MLRB < 0) | ((plan.replica_MLRB < 0) & (plan.quota_MLRB != 0))).any():
        raise PlanError("a quota is negative, or belongs to an empty slot")
    m_X, layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB >= 0)
    expert_X = plan.replica_MLRB[m_X, layer_X, rank_X, slot_X].astype(np.int64)
    slot_of_expert_LE = np.empty(plan.physical_to_logical_map.shape, dtype=np.int64)
    np.put_along_axis(
        slot_of_expert_LE, plan.physical_to_logical_map.astype(np.int64), np.arange(plan.num_experts)[None], axis=1
    )
    home_X = slot_of_expert_LE[layer_X, expert_X] // per_rank
    twice_MLRB = np.zeros(plan.replica_MLRB.shape, dtype=bool)
    for b in range(1, plan.slots):
        twice_MLRB[..., b] = (plan.replica_MLRB[..., :b] == plan.replica_MLRB[..., b : b + 1]).any(axis=3)
    twice_X = twice_MLRB[m_X, layer_X, rank_X, slot_X]
    away_X = home_X // plan.ranks_per_node != rank_X // plan.ranks_per_node
    for wrong_X, reason in (
        (home_X == rank_X, "is at home there"),
        (twice_X, "is there twice"),
        (away_X & (plan.scope == "node"), "left the node of its home, which this plan's scope forbids"),
    ):
        if wrong_X.any():
            x = int(np.argmax(wrong_X))
            raise PlanError(
                f"{_where(plan, int(layer_X[x]), int(m_X[x]))}: expert {expert_X[x]} has a replica on rank "
                f"{rank_X[x]}, but {reason}"
            )


def _check_quotas(plan: StepPlan, demand: Demand) -> np.ndarray:
    """Recount every rank's load from the samples, expert by expert."""
    M, L, R, _ = plan.replica_MLRB.shape
    E = plan.num_experts
    load_MLE = np.zeros((M, L, E), dtype=np.int64)
    for s in np.flatnonzero(plan.micro_batch_S >= 0):
        load_MLE[plan.micro_batch_S[s]] += demand.counts_SLE[s]
    home_left_MLE = load_MLE.copy()
    load_MLR = np.zeros((M, L, R), dtype=np.int64)
    for r in range(R):
        for b in range(plan.slots):
            m_X, layer_X = np.nonzero(plan.replica_MLRB[:, :, r, b] >= 0)
            expert_X = plan.replica_MLRB[m_X, layer_X, r, b]
            taken_X = plan.quota_MLRB[m_X, layer_X, r, b]
            load_MLR[m_X, layer_X, r] += taken_X
            home_left_MLE[m_X, layer_X, expert_X] -= taken_X  # each (micro-batch, layer) is there once
    if (home_left_MLE < 0).any():
        m, layer, e = np.argwhere(home_left_MLE < 0)[0].tolist()
        has, too_many = load_MLE[m, layer, e], -home_left_MLE[m, layer, e]
        raise PlanError(
            f"{_where(plan, layer, m)}: replicas of expert {e} take {has + too_many} token-slots, it gets {has}"
        )
    per_rank = E // R
    for r in range(R):
        experts_LX = plan.physical_to_logical_map[:, r * per_rank : (r + 1) * per_rank].astype(np.int64)
        load_MLR[:, :, r] += np.take_along_axis(home_left_MLE, experts_LX[None].repeat(M, axis=0), axis=2).sum(axis=2)
    assert np.array_equal(load_MLR.sum(axis=2), load_MLE.sum(axis=2)), "a token-slot is computed twice or never"
    return load_MLR


def _where(plan: StepPlan, layer: int, micro_batch: int) -> str:
    return f"layer {plan.layer_ids[layer]}, micro-batch {micro_batch}"
