"""Steps for the executor: routes, schedules, and plans by the planner or by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relibra import Budget, plan_step
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand
from relibra.routing.trace import RoutingTrace
from tests.parallel.ranks_at_work import Case
from tests.planning.cases import cluster
from tests.replay.tiny_models import random_experts

E = 8
TWO_MICRO_BATCHES = ([0, 0, 1, 1], [0, 1, 0, 1])


def step(num_ranks=2, lengths=(9, 12, 7, 10), schedule=TWO_MICRO_BATCHES, slots=1, replicas=None, **settings):
    """Return a case of this many ranks; `replicas`: by hand instead of by the planner."""
    of_trace = {name: settings.pop(name) for name in ("layer_ids", "unrouted_last", "top_k") if name in settings}
    trace = settings.pop("trace", None) or skewed_trace(lengths, **of_trace)
    demand = scheduled(trace, *schedule, num_ranks)
    plan = planned(demand, num_ranks, slots) if replicas is None else by_hand(demand, num_ranks, replicas)
    return Case(plan=plan, demand=demand, trace=trace, num_ranks=num_ranks, **settings)


def skewed_trace(lengths, *, layer_ids=(0, 1, 2), top_k=2, unrouted_last=False, seed=0) -> RoutingTrace:
    """Half of the tokens take an expert of the first rank that is hot in their layer."""
    rng = np.random.default_rng(seed)
    samples = []
    for s, n in enumerate(lengths):
        experts_TLK = random_experts(n, len(layer_ids), E, top_k, seed + s)
        for layer in range(len(layer_ids)):
            rows = np.flatnonzero((rng.random(n) < 0.7) & (experts_TLK[:, layer] != layer % 2).all(axis=1))
            experts_TLK[rows, layer, 0] = layer % 2
        samples.append(experts_TLK)
    return of_experts(samples, layer_ids=layer_ids, unrouted_last=unrouted_last)


def of_experts(samples, *, layer_ids=(0, 1, 2), unrouted_last=False) -> RoutingTrace:
    return RoutingTrace.from_samples(
        samples,
        num_experts=E,
        layer_ids=list(layer_ids),
        valid=[np.arange(len(rows)) < len(rows) - unrouted_last for rows in samples],
    )


def scheduled(trace, micro_batch_S, rank_S, num_ranks) -> Demand:
    return Demand.from_trace(trace).with_schedule(np.array(micro_batch_S), np.array(rank_S), num_ranks)


def planned(demand, num_ranks, slots=1) -> StepPlan:
    budget = Budget(slots=slots, move_homes=False, pack_samples=False)
    return plan_step(demand, cluster(1, num_ranks), budget, "relibra_paper_tokens", never_worse=False)


def by_hand(demand, num_ranks, replicas) -> StepPlan:
    """Plan these replicas in every micro-batch and layer.

    replicas    (rank, slot, expert, share of the expert's token-slots)
    """
    slots = 1 + max((slot for _, slot, _, _ in replicas), default=-1)
    plan = planned(demand, num_ranks, slots=0)
    load_MLE = demand.load_MLE
    replica_MLRB = np.full((*load_MLE.shape[:2], num_ranks, slots), -1, dtype=np.int16)
    quota_MLRB = np.zeros(replica_MLRB.shape, dtype=np.int32)
    for rank, slot, expert, share in replicas:
        replica_MLRB[:, :, rank, slot] = expert
        quota_MLRB[:, :, rank, slot] = np.floor(load_MLE[:, :, expert] * share)
    bound_ML = np.zeros_like(plan.bound_ML)
    return replace(plan, balancer="by hand", replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB, bound_ML=bound_ML)


def on_nodes(case: Case, num_nodes, dispatch="hierarchical") -> Case:
    """Return the case with its ranks on nodes; replicas stay where they are."""
    per_node = case.plan.num_ranks // num_nodes
    plan = replace(case.plan, num_nodes=num_nodes, ranks_per_node=per_node, scope="cluster", dispatch=dispatch)
    return replace(case, plan=plan)


def random_step(seed, num_ranks, num_layers=3) -> Case:
    """Draw sizes, schedule, replicas and quotas; empty batches, idle replicas and homes without tokens come up."""
    rng = np.random.default_rng(seed)
    S = int(rng.integers(1, 7))
    micro_batch_S = np.sort(rng.integers(0, 3, S))
    micro_batch_S = np.unique(micro_batch_S, return_inverse=True)[1]
    case = step(
        num_ranks,
        lengths=rng.integers(2, 12, S).tolist(),
        schedule=(micro_batch_S.tolist(), rng.integers(0, num_ranks, S).tolist()),
        slots=int(rng.integers(1, 4)),
        family=["qwen3_moe", "mixtral", "gpt_oss"][rng.integers(3)],
        checkpointing=bool(rng.integers(2)),
        in_flight=bool(rng.integers(2)),
        unrouted_last=bool(rng.integers(2)),
        ahead=bool(seed % 2),
    )
    replica_MLRB = np.full((micro_batch_S.max() + 1, num_layers, num_ranks, case.plan.slots), -1, dtype=np.int16)
    quota_MLRB = np.zeros(replica_MLRB.shape, dtype=np.int32)
    left_MLE = case.demand.load_MLE.copy()
    for m, layer, rank in np.ndindex(replica_MLRB.shape[:3]):
        away = [e for e in range(E) if e // (E // num_ranks) != rank]
        for slot, expert in enumerate(rng.permutation(away)[: case.plan.slots]):
            if rng.random() < 0.8:
                quota = rng.integers(0, left_MLE[m, layer, expert] + 1)
                replica_MLRB[m, layer, rank, slot], quota_MLRB[m, layer, rank, slot] = expert, quota
                left_MLE[m, layer, expert] -= quota
    plan = replace(
        case.plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB, bound_ML=np.zeros_like(case.plan.bound_ML)
    )
    return replace(case, plan=plan)


def resident_step(seed, num_ranks, *, micro_batches=4, samples=None, slots=None, **settings) -> Case:
    """Draw a step of two groups whose resident replicas often stay, in any slot, idle at times; slots None: drawn."""
    rng = np.random.default_rng(seed)
    S = samples or 2 * micro_batches
    micro_batch_S = np.sort(np.append(np.arange(micro_batches), rng.integers(0, micro_batches, S - micro_batches)))
    slots = int(rng.integers(1, 4)) if slots is None else slots
    settings.setdefault("lengths", rng.integers(2, 12, S).tolist())
    schedule = (micro_batch_S.tolist(), rng.integers(0, num_ranks, S).tolist())
    case = step(num_ranks, schedule=schedule, slots=slots, **settings)
    replica_MLRB, quota_MLRB = staying_replicas(rng, case.demand.load_MLE, case.plan.home_LE, num_ranks, slots)
    plan = replace(
        case.plan,
        replica_MLRB=replica_MLRB,
        quota_MLRB=quota_MLRB,
        bound_ML=np.zeros_like(case.plan.bound_ML),
        resident=True,
        group_M=(np.arange(micro_batches) >= micro_batches - micro_batches // 3).astype(np.int32),
    )
    return replace(case, plan=plan)


def staying_replicas(rng, load_MLE, home_LE, num_ranks, slots):
    """Draw replicas and quotas; each stays with probability 0.7, some are idle."""
    M, L, E = load_MLE.shape
    replica_MLRB = np.full((M, L, num_ranks, slots), -1, dtype=np.int16)
    quota_MLRB = np.zeros(replica_MLRB.shape, dtype=np.int32)
    left_MLE = load_MLE.copy()
    for m, layer, rank in np.ndindex(M, L, num_ranks):
        before = replica_MLRB[m - 1, layer, rank] if m else []
        held = [int(e) for e in before if e >= 0 and rng.random() < 0.7]
        others = [e for e in range(E) if home_LE[layer, e] != rank and e not in held]
        drawn = [int(e) if rng.random() < 0.8 else -1 for e in rng.permutation(others)[: slots - len(held)]]
        drawn += [-1] * (slots - len(held) - len(drawn))
        replica_MLRB[m, layer, rank] = rng.permutation(held + drawn)
        for slot, e in enumerate(replica_MLRB[m, layer, rank]):
            if e >= 0 and rng.random() < 0.8:
                quota_MLRB[m, layer, rank, slot] = quota = rng.integers(0, left_MLE[m, layer, e] + 1)
                left_MLE[m, layer, e] -= quota
    return replica_MLRB, quota_MLRB
