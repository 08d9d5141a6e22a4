"""StepPlan: validation that no solver wrote, digests, words, differences."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import PlanError
from relibra.planning.analysis.explanation import diff, explain_plan
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Homes
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from tests.planning.cases import cluster, make_demand

DEMAND = make_demand(24, 3, 16, 4, 8, 0)
MACHINE = cluster(2, 4)


@pytest.fixture(scope="module")
def plan():
    return plan_step(DEMAND, MACHINE, Budget(slots=2), "relibra_paper_tokens", never_worse=False)


def _changed(plan, name, change):
    array = getattr(plan, name).copy()
    change(array)
    return replace(plan, **{name: array})


def _first_replica(plan):
    return tuple(int(i) for i in np.argwhere(plan.replica_MLRB >= 0)[0])


def test_broken_plans_are_refused_with_the_place(plan):
    m, layer, r, b = _first_replica(plan)
    e = int(plan.replica_MLRB[m, layer, r, b])
    empty = tuple(np.argwhere(plan.replica_MLRB < 0)[0])
    other_node = next(x for x in range(16) if plan.home_LE[layer, x] // 4 != r // 4)

    def home_twice(array):
        array[1, 0] = array[1, 1]

    cases = {
        "layer 1: physical_to_logical_map does not give": _changed(plan, "physical_to_logical_map", home_twice),
        "layer 1: previous_map does not give": _changed(plan, "previous_map", home_twice),
        "outside 0..15": _changed(plan, "replica_MLRB", lambda a: a.__setitem__((m, layer, r, b), 16)),
        "belongs to an empty slot": _changed(plan, "quota_MLRB", lambda a: a.__setitem__(empty, 3)),
        "a quota is negative": _changed(plan, "quota_MLRB", lambda a: a.__setitem__((m, layer, r, b), -1)),
        "token-slots, it gets": _changed(plan, "quota_MLRB", lambda a: a.__setitem__((m, layer, r, b), 10**6)),
        f"on rank {r}, but left the node": _changed(
            plan, "replica_MLRB", lambda a: a.__setitem__((m, layer, r, b), other_node)
        ),
        "is there twice": _changed(plan, "replica_MLRB", lambda a: a.__setitem__((m, layer, r), [e, e])),
        "but is at home there": _changed(
            plan, "replica_MLRB", lambda a: a.__setitem__((m, layer, r, b), np.argmax(plan.home_LE[layer] == r))
        ),
        "micro-batches outside": _changed(plan, "micro_batch_S", lambda a: a.__setitem__(0, 99)),
        "is in the plan or in the demand's schedule": _changed(plan, "micro_batch_S", lambda a: a.__setitem__(0, -1)),
        "ranks outside 0..7": _changed(plan, "rank_S", lambda a: a.__setitem__(0, 8)),
        "below the plan's bound": replace(plan, bound_ML=plan.bound_ML + 10**6),
        "made for another model": _changed(plan, "layer_ids", lambda a: a.__setitem__(0, 7)),
    }
    for words, broken in cases.items():
        with pytest.raises(PlanError, match=words):
            validate_plan(broken, MACHINE.topology, DEMAND)
    with pytest.raises(PlanError, match="micro_batch_S has shape"):
        validate_plan(plan, MACHINE.topology, make_demand(23, 3, 16, 4, 8, 0))
    with pytest.raises(PlanError, match="plan again"):
        validate_plan(plan, cluster(1, 8).topology, DEMAND)
    longer = DEMAND.with_schedule(DEMAND.micro_batch_S, DEMAND.rank_S, 8, 5)
    longer = replace(longer, group_M=np.array([0, 0, 1, 1, 1], dtype=np.int32))
    with pytest.raises(PlanError, match="the plan has 4 micro-batches, the demand 5"):
        validate_plan(plan, MACHINE.topology, longer)


def test_ranks_beyond_their_limit_are_refused(plan):
    """One sample may be alone on its rank however long it is; two together must be within the limit."""
    tokens = DEMAND.sum_per_rank(DEMAND.length_S)
    attention = DEMAND.sum_per_rank(DEMAND.length_S**2)
    validate_plan(plan, MACHINE.topology, DEMAND, rank_tokens=int(tokens.max()), rank_attention=int(attention.max()))
    together = replace(plan, rank_S=np.zeros_like(plan.rank_S), bound_ML=np.zeros_like(plan.bound_ML))
    in_first = DEMAND.length_S[plan.micro_batch_S == 0]
    limit = int(in_first.sum()) - 1
    with pytest.raises(PlanError, match=f"micro-batch 0: rank 0 has {limit + 1:,} tokens in {len(in_first)} samples"):
        validate_plan(together, MACHINE.topology, DEMAND, rank_tokens=limit)
    with pytest.raises(PlanError, match=r"rank 0 has [\d,]+ squared tokens, the cost of attention, in \d+ samples"):
        validate_plan(together, MACHINE.topology, DEMAND, rank_attention=int(attention.max()))
    alone = DEMAND.with_schedule(np.where(np.arange(24) == 3, 0, -1), np.zeros(24, dtype=int), 8, 4)
    validate_plan(plan_step(alone, MACHINE, Budget(slots=0)), MACHINE.topology, alone, rank_tokens=1)


def test_samples_that_leave_their_group_are_refused(plan):
    """Micro-batches 0 and 1 are a mini-batch, 2 and 3 another."""
    groups = np.array([0, 0, 1, 1], dtype=np.int32)
    demand, made = replace(DEMAND, group_M=groups), replace(plan, group_M=groups, bound_ML=np.zeros_like(plan.bound_ML))
    validate_plan(made, MACHINE.topology, demand)
    s = int(np.flatnonzero(DEMAND.micro_batch_S == 1)[0])
    inside = _changed(made, "micro_batch_S", lambda a: a.__setitem__(s, 0))
    outside = _changed(made, "micro_batch_S", lambda a: a.__setitem__(s, 2))
    without_replicas = {
        "replica_MLRB": np.full_like(plan.replica_MLRB, -1),
        "quota_MLRB": np.zeros_like(plan.quota_MLRB),
    }
    validate_plan(replace(inside, **without_replicas), MACHINE.topology, demand)
    with pytest.raises(PlanError, match=f"sample {s} moves from group 0 of micro-batches to group 1: it must stay"):
        validate_plan(outside, MACHINE.topology, demand)
    with pytest.raises(PlanError, match="micro-batch 1 is in group 1 of the plan, in 0 of the demand"):
        validate_plan(replace(made, group_M=np.array([0, 1, 1, 1], dtype=np.int32)), MACHINE.topology, demand)


def test_slots_beyond_the_memory_of_a_rank_are_refused(plan):
    """A slot holds weights in bf16 and gradients in fp32; a resident one in each of 3 layers."""
    expert = ExpertShape(hidden=1000, width=1000)  # 3 million parameters, 18 MB
    validate_plan(plan, MACHINE.topology, DEMAND, memory_bytes=36_000_000, expert=expert)
    validate_plan(plan, MACHINE.topology, DEMAND, memory_bytes=1)
    with pytest.raises(PlanError, match=r"slots for 2 experts take 0\.036 GB on every rank, which has 0\.035 GB"):
        validate_plan(plan, MACHINE.topology, DEMAND, memory_bytes=35_000_000, expert=expert)
    resident = replace(plan, resident=True)
    validate_plan(resident, MACHINE.topology, DEMAND, memory_bytes=108_000_000, expert=expert)
    with pytest.raises(PlanError, match="slots for 6 experts"):
        validate_plan(resident, MACHINE.topology, DEMAND, memory_bytes=107_000_000, expert=expert)


@given(st.integers(0, 2**32 - 1))
def test_any_single_change_of_a_decision_changes_the_digest(seed):
    rng = np.random.default_rng(seed)
    plan = plan_step(DEMAND, MACHINE, Budget(slots=2), "ultraep", never_worse=False)
    name = sorted(plan.decisions())[rng.integers(len(plan.decisions()))]
    array = getattr(plan, name).copy()
    array.flat[rng.integers(array.size)] += 1
    assert replace(plan, **{name: array}).digest() != plan.digest()
    assert replace(plan, balancer="other", plan_seconds=9.0, predicted={}).digest() == plan.digest()


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4))
def test_maps_keep_experts_that_stay_in_their_slots(seed, ranks, per_rank):
    rng = np.random.default_rng(seed)
    E = ranks * per_rank
    slots = np.stack([rng.permutation(E), rng.permutation(E)]).astype(np.int16)
    before = Homes(num_nodes=ranks, ranks_per_node=1, layer_ids=np.arange(2), physical_to_logical_map=slots)
    home_LE = np.stack([rng.permutation(np.repeat(np.arange(ranks), per_rank)) for _ in range(2)]).astype(np.int16)
    after = before.with_home_ranks(home_LE)
    assert (after.home_LE == home_LE).all()
    stays = before.home_LE == home_LE
    for layer in range(2):
        slot_before, slot_after = (np.argsort(homes.physical_to_logical_map[layer]) for homes in (before, after))
        assert (slot_before[stays[layer]] == slot_after[stays[layer]]).all()


def test_explanations_have_each_replica_with_its_home(plan):
    m, layer, r, _ = _first_replica(plan)
    explained = explain_plan(plan, DEMAND, int(plan.layer_ids[layer]), m)
    assert (explained.layer, explained.micro_batch) == (int(plan.layer_ids[layer]), m)
    assert explained.moved_homes == (plan.previous.home_LE[layer] != plan.home_LE[layer]).sum()
    assert explained.busiest_load_with_replicas == plan.rank_load(plan.scheduled(DEMAND))[m, layer].max()
    e = int(plan.replica_MLRB[m, layer, r][0])
    replica = next(one for one in explained.replicas if (one.expert, one.rank) == (e, r))
    assert replica.quota == plan.quota_MLRB[m, layer, r][0] <= replica.token_slots
    assert replica.home_rank == plan.home_LE[layer, e]
    quotas = [replica.quota for replica in explained.replicas]
    assert quotas == sorted(quotas, reverse=True)
    with pytest.raises(PlanError, match=r"layer 9 .*\[0, 1, 2\]"):
        explain_plan(plan, DEMAND, 9)
    with pytest.raises(PlanError, match=r"micro-batch 4 .* 4, counted from 0"):
        explain_plan(plan, DEMAND, 0, 4)


def test_replicas_without_tokens_are_explained(plan):
    m, layer, _, _ = _first_replica(plan)
    empty = replace(DEMAND, counts_SLE=0 * DEMAND.counts_SLE)
    unused = replace(plan, quota_MLRB=0 * plan.quota_MLRB, demand_digest=empty.digest())
    explained = explain_plan(unused, empty, int(plan.layer_ids[layer]), m)
    assert {(one.quota, one.home_load) for one in explained.replicas} == {(0, 0.0)}


def test_differences_count_homes_samples_and_copies(plan):
    static = plan_step(DEMAND, MACHINE, Budget(slots=2), "static")
    same = diff(plan, plan)
    assert (same.homes, same.samples, same.cells) == ((), 0, 0)
    change = diff(static, plan)
    assert len(change.homes) == plan.num_moved
    assert change.copies == (0, plan.num_copies)
    assert change.cells > 0
    assert str(change).startswith(f"{plan.num_moved} homes moved; ")
    with pytest.raises(PlanError, match="cannot be compared"):
        diff(plan, plan_step(make_demand(24, 3, 32, 4, 8, 0), MACHINE, Budget(), "static"))
