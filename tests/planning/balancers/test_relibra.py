"""The decision: never dearer than with fewer levers, what it considered, the same in every process, odd sizes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.planner.steps import domain_step
from relibra import parallel_map
from relibra.cluster import cluster_preset
from relibra.planning.balancers.layer_plans import LayerChoice, SlotChoice, plan_layers
from relibra.planning.balancers.relibra import probe_of
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import pushed_copies, slot_bytes
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from relibra.routing.demand import Demand
from tests.examples import quick_and_slow
from tests.planning.balancers.requests import ask
from tests.planning.cases import seconds_of

QWEN, GPT_OSS = EXPERT_SHAPES["qwen3-30b-a3b"], EXPERT_SHAPES["gpt-oss-20b"]
SLACK = 1.002
"""More slots must save a thousandth; the rest is for estimates from few layers."""


def small_step(ranks=16, *, experts=32, layers=2, micro_batches=8, groups=1, tokens=1024, seed=0, step=0):
    demand = domain_step(
        ranks=ranks, layers=layers, experts=experts, micro_batches=micro_batches, samples=2 * ranks * micro_batches,
        tokens=tokens // 2, seed=seed, top_k=4, step=step,
    )  # fmt: skip
    return replace(demand, group_M=(np.arange(micro_batches) * groups // micro_batches).astype(np.int32))


def machine(ranks, dispatch="hierarchical", **changes):
    return replace(cluster_preset("h100x8", ranks), dispatch=dispatch, **changes)


SETTINGS = {
    "one node": lambda: (small_step(8), machine(8), QWEN),
    "two nodes": lambda: (small_step(), machine(16), GPT_OSS),
    "two nodes, flat": lambda: (small_step(micro_batches=16, tokens=2048, seed=19), machine(16, "flat"), GPT_OSS),
    "mini-batches": lambda: (small_step(groups=4, layers=8, seed=28), machine(16, "flat"), QWEN),
    "four nodes, short": lambda: (small_step(32, tokens=64, micro_batches=4, seed=39), machine(32, "flat"), GPT_OSS),
    "copies not hidden": lambda: (small_step(32, tokens=512, seed=18), machine(32, hides_copies=False), GPT_OSS),
}
QUICK = ["one node", "two nodes"]
of_settings = quick_and_slow("name", QUICK, [name for name in SETTINGS if name not in QUICK])


def test_homes_even_out_micro_batches_where_copies_wait():
    counts_SLE = np.array([[[10, 8, 1, 3]], [[2, 2, 10, 8]]], dtype=np.int32) * 1000  # by totals no expert moves
    samples = np.arange(2, dtype=np.int32)
    demand = Demand(counts_SLE=counts_SLE, layer_ids=np.zeros(1, dtype=np.int32), sample_ids=samples, top_k=1)
    demand = demand.with_schedule(samples, samples, 2)
    budget = Budget(slots=0, steps_served=100)
    plan = plan_step(demand, cluster_preset("laptop", 2), budget, expert=replace(QWEN, width=64))
    assert plan.home_LE[0, 0] == plan.home_LE[0, 2] != plan.home_LE[0, 1]
    assert plan.skew(demand) == pytest.approx(23 / 22)


@cache
def planned_seconds(name, budget):
    demand, cluster, expert = SETTINGS[name]()
    return seconds_of(plan_step(demand, cluster, budget, expert=expert), budget)


@quick_and_slow("slots", [(0, 2, None)], [(0, 1, 2, 3, 4, 8, None)])
@of_settings
def test_more_slots_never_make_a_plan_slower(name, slots):
    lowest = np.inf
    for number in slots:
        seconds = planned_seconds(name, Budget(slots=number))
        assert seconds <= SLACK * lowest, number
        lowest = min(lowest, seconds)


@pytest.mark.parametrize("fewer", [{"move_homes": False}, {"pack_samples": False}, {"memory_gib": 0.0}], ids=str)
@of_settings
def test_a_lever_never_makes_a_plan_slower(name, fewer):
    assert planned_seconds(name, Budget()) <= SLACK * planned_seconds(name, Budget(**fewer))


def test_replicas_pay_on_several_nodes():
    assert planned_seconds("two nodes", Budget()) < 0.75 * planned_seconds("two nodes", Budget(slots=0))


@of_settings
def test_one_choice_that_fits_the_memory_is_chosen(name):
    demand, cluster, expert = SETTINGS[name]()
    for memory_gib in (0.0, 0.5, None):
        plan = plan_step(demand, cluster, Budget(memory_gib=memory_gib, slots=4), expert=expert, never_worse=False)
        [chosen] = [row for row in plan.considered if row.chosen]
        assert (chosen.slots, chosen.resident) == (plan.slots, plan.resident) or not plan.num_copies
        kept = [(row.slots, row.resident) for row in plan.considered if row.schedule == "kept"]
        assert kept[:3] == [(0, False), (1, False), (2, False)]
        assert set(kept[3:]) <= {(number, True) for number in (1, 2, 4)}
        assert len(set(kept)) == len(kept)
        of_layers = [row for row in plan.considered if row.resident]
        assert all(memory_gib is None or row.memory_gib <= memory_gib for row in of_layers)
        assert bool(of_layers) == (memory_gib != 0.0)
        assert chosen.memory_gib == pytest.approx(slot_bytes(plan, expert) / 2**30) or not plan.num_copies
        assert chosen.seconds == pytest.approx(seconds_of(plan, Budget()), rel=0.02)


@quick_and_slow("name", ["two nodes, flat"], ["copies not hidden"])
def test_layers_of_one_group_follow_their_cheapest_choice(name):
    demand, cluster, expert = SETTINGS[name]()
    plan = plan_step(demand, cluster, Budget(move_homes=False), expert=expert)
    assert plan.resident
    seconds_CL = np.array([row.seconds_L for row in plan.considered_layers])
    followed_CL = np.array([row.micro_batches_L for row in plan.considered_layers])
    assert (followed_CL.sum(axis=0) == len(plan.bound_ML)).all()
    assert np.where(followed_CL, seconds_CL, 0).sum(axis=0) == pytest.approx(seconds_CL.min(axis=0))


def test_any_number_of_threads_makes_the_same_plan(monkeypatch):
    demand, cluster, expert = SETTINGS["mini-batches"]()
    plans = []
    for cores in (1, 5):
        monkeypatch.setattr(parallel_map, "available_cores", lambda cores=cores: cores)
        plans.append(plan_step(demand, cluster, expert=expert))
    assert plans[0].digest() == plans[1].digest()
    assert_samples_and_residents_stay_in_their_mini_batch(demand, plans[0])


def assert_samples_and_residents_stay_in_their_mini_batch(demand, plan):
    group_S = demand.group_M[plan.micro_batch_S]
    assert (group_S == demand.group_M[demand.micro_batch_S]).all()
    assert plan.resident
    starts = np.diff(plan.group_M, prepend=-1) > 0
    forward, _, _ = pushed_copies(plan)
    assert (forward == (plan.replica_MLRB >= 0))[starts].all()


@quick_and_slow("ranks", [8], [16, 32])
@pytest.mark.parametrize("changes", [{}, {"memory_gib": 0.0}], ids=str)
def test_a_second_step_of_the_same_popularity_moves_few_homes(ranks, changes):
    first = plan_step(small_step(ranks), machine(ranks), Budget(**changes), expert=QWEN)
    again = small_step(ranks, step=1)
    second = plan_step(again, machine(ranks), Budget(**changes), expert=QWEN, previous=first)
    assert second.num_moved <= (0.3 if changes else 0.05) * second.home_LE.size  # replicas of a pass hide less
    still = Budget(**changes, move_homes=False)
    stay = plan_step(again, machine(ranks), still, expert=QWEN, previous=first)
    assert seconds_of(second, still) <= SLACK * seconds_of(stay, still)


def test_moves_are_charged_to_the_steps_that_they_serve():
    demand = small_step(tokens=256)
    moved = [
        plan_step(demand, machine(16), Budget(slots=0, steps_served=steps), expert=QWEN).num_moved
        for steps in (1, 1000)
    ]
    assert moved[0] < moved[1]


@pytest.mark.parametrize(("per_group", "kept"), [(100, 32), (40, 40), (10, 40), (1, 32)])
def test_a_sample_ends_with_a_group_and_pays_its_share_of_moves(per_group, kept):
    request = ask(np.ones((100, 8, 2, 4)), 1, slots=1, steps_served=12)
    demand = replace(request.demand, group_M=(np.arange(100) // per_group).astype(np.int32))
    probe = probe_of(replace(request, demand=demand))
    assert probe.demand.tokens_MLRE.shape[:2] == (kept, 6)
    assert probe.budget.steps_served == round(12 * 100 / kept)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (8, {"layers": 1}),
        (8, {"experts": 8}),
        (16, {"experts": 48}),
        (12, {"experts": 60}),
        (8, {"micro_batches": 1}),
    ],
    ids=str,
)
def test_odd_sizes_get_valid_plans(ranks, changes):
    demand, cluster = small_step(ranks, **changes), machine(8).with_ranks(ranks, min(ranks, 4))
    plan = plan_step(demand, cluster, expert=QWEN)
    validate_plan(plan, cluster.topology, demand)
    static = plan_step(demand, cluster, balancer="static", expert=QWEN)
    assert seconds_of(plan, Budget()) <= static.predicted["total"]


def test_an_empty_micro_batch_and_unknown_choices_per_token():
    demand, cluster = small_step(), machine(16)
    longer = replace(demand, top_k=None, group_M=None).with_schedule(demand.micro_batch_S, demand.rank_S, 16, 10)
    plan = plan_step(longer, cluster, expert=QWEN)
    validate_plan(plan, cluster.topology, longer)
    assert plan.replica_MLRB.shape[0] == 10
    assert plan.num_copies > 0


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_mixed_layers_cost_what_their_placement_costs(resident, first):
    """A mix of choices is priced from the costs of each; one of them has no replicas, in some layers."""
    rng = np.random.default_rng(4)
    request = ask(rng.integers(0, 30, (4, 6, 8, 16)) * (1 + 5 * (np.arange(16) < 3)), 2, slots=2, expert=QWEN)
    slots, demand = SlotChoice(number=2, resident=resident), request.demand
    plans = [
        plan_layers(request, demand, slots, one)
        for one in (LayerChoice(), LayerChoice(tolerance=0.01, cross_node=True))
    ]
    has_none_L = np.arange(6) == 2
    if first == 0:
        mix = plans[0].with_layers(plans[1], ~has_none_L)
    else:
        mix = plans[1].with_layers(plans[0], has_none_L)
    placement = request.placement(mix.home_LE, mix.replica_MLRB, mix.quota_MLRB, resident=resident, scope="cluster")
    costs, attention_M = layer_costs(placement, demand, request.cluster, QWEN), np.zeros(4)
    for name in ("compute_ML", "exchange_ML", "host_ML"):
        np.testing.assert_array_equal(getattr(mix.costs, name), getattr(costs, name))
    assert costs.push.seconds_ML.any()
    np.testing.assert_array_equal(mix.costs.exposed_copies_ML(attention_M), costs.exposed_copies_ML(attention_M))
