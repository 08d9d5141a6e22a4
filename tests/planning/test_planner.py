"""Whole plans: valid for anything that comes in, never worse than static, the same bytes everywhere."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.errors import PlanError, TraceError
from relibra.planning.budget import Budget
from relibra.planning.costs.exchange import rows_per_crossing
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.costs.prediction import predict
from relibra.planning.plan import StepPlan
from relibra.planning.planner import memory_beside_experts, plan_step
from relibra.planning.registry import BALANCERS
from relibra.planning.validation import validate_plan
from relibra.rl.batch.schedule import make_schedule
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.statistics import co_activation
from relibra.routing.synthetic import TraceShape, domain_trace
from tests.examples import few_and_many
from tests.planning.cases import cluster, demands, make_demand, seconds_of
from tests.planning.levers.schedules import assert_within_limits, bins_of, most_squares, scheduled_demands

SMALL = EXPERT_SHAPES["qwen3-30b-a3b"]


@few_and_many(12, 120)
def test_any_demand_gets_a_valid_plan_never_above_static(examples):
    @settings(max_examples=examples)
    @given(demands(), st.integers(0, 2), st.booleans(), st.booleans(), st.sampled_from(["flat", "hierarchical"]))
    def check(case, slots, move, pack, dispatch):
        demand, machine = case[0], replace(case[1], dispatch=dispatch)
        budget = Budget(slots=slots, move_homes=move, pack_samples=pack)
        plan = plan_step(demand, machine, budget, expert=SMALL)
        validate_plan(plan, machine.topology, demand)
        assert plan.dispatch == dispatch
        assert plan.slots <= slots
        static = plan_step(demand, machine, budget, "static", expert=SMALL)
        assert seconds_of(plan, budget) <= static.predicted["total"]
        compared = StepPlan.static(demand, machine.topology, dispatch=dispatch)
        assert predict(compared, demand, machine, SMALL).total == pytest.approx(static.predicted["total"])
        assert plan.bound(plan.scheduled(demand)) <= plan.skew(plan.scheduled(demand)) + 1e-12
        if not move:
            assert plan.num_moved == 0
        if not pack:
            assert (plan.micro_batch_S == demand.micro_batch_S).all()

    check()


@few_and_many(3, 30)
def test_every_balancer_makes_valid_plans(examples):
    @settings(max_examples=examples)
    @given(demands(), st.integers(0, 2))
    def check(case, slots):
        demand, machine = case
        history = np.ones((2, *demand.counts_SLE.shape[1:]), dtype=np.int64)
        for name in BALANCERS:
            for never_worse in (True, False):
                options = {"expert": SMALL, "history_MLE": history, "never_worse": never_worse}
                plan = plan_step(demand, machine, Budget(slots=slots), name, **options)
                validate_plan(plan, machine.topology, demand)

    check()


def test_another_process_makes_the_same_plan():
    program = (
        "from tests.planning.cases import *; from relibra.planning import Budget, plan_step;"
        "print(plan_step(make_demand(32, 3, 16, 4, 8, 5), cluster(2, 4), Budget(slots=1)).digest())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    here = plan_step(make_demand(32, 3, 16, 4, 8, 5), cluster(2, 4), Budget(slots=1)).digest()
    assert done.stdout == here + "\n"


def test_history_is_all_that_history_driven_balancers_see():
    demand, machine = make_demand(32, 2, 16, 4, 8, 6), cluster(1, 8)
    other = make_demand(32, 2, 16, 4, 8, 7)
    history = make_demand(32, 2, 16, 4, 8, 8).load_MLE
    plans = [
        plan_step(d, machine, Budget(slots=1), "eplb_history", history_MLE=history, never_worse=False)
        for d in (demand, other)
    ]
    assert (plans[0].physical_to_logical_map == plans[1].physical_to_logical_map).all()
    known = [plan_step(d, machine, Budget(slots=1), "eplb", never_worse=False) for d in (demand, other)]
    assert (known[0].physical_to_logical_map != known[1].physical_to_logical_map).any()


def test_after_losing_ranks_a_step_is_planned_anew():
    demand, machine = make_demand(32, 2, 48, 4, 16, 6, tokens=2048), cluster(2, 8)
    before = plan_step(demand, machine, Budget(slots=1))
    smaller = machine.with_ranks(8)
    fewer = demand.with_schedule(demand.micro_batch_S, demand.rank_S % 8, 8)
    with pytest.raises(PlanError, match="nodes 2, this step 1"):
        plan_step(fewer, smaller, Budget(slots=1), previous=before)
    plan = plan_step(fewer, smaller, Budget(slots=1))
    validate_plan(plan, smaller.topology, fewer)
    static = plan_step(fewer, smaller, Budget(), "static")
    assert plan.skew(plan.scheduled(fewer)) < 0.9 * static.skew(fewer)
    assert plan.num_moved == (plan.home_LE != static.home_LE).sum()


def test_the_previous_plan_is_of_the_same_model():
    demand, machine = make_demand(16, 2, 16, 2, 8, 0), cluster(1, 8)
    before = plan_step(demand, machine, Budget(slots=1))
    other = replace(demand, layer_ids=demand.layer_ids + 3)
    with pytest.raises(PlanError, match=r"the previous plan has layers \[0, 1\], this step \[3, 4\]"):
        plan_step(other, machine, Budget(slots=1), previous=before)


def test_packing_keeps_samples_in_their_group():
    """Experts in turn: half of the samples use one half of them, and micro-batches are dealt pure."""
    groups = [make_demand(128, 2, 32, 8, 16, seed, tokens=2048) for seed in (1, 2)]
    together = ScheduledDemand.of_groups(groups)
    plan = plan_step(together, cluster(2, 8), Budget(slots=1), expert=SMALL)
    assert (plan.micro_batch_S != together.micro_batch_S).any()
    assert ((plan.micro_batch_S >= 8) == (together.micro_batch_S >= 8)).all()
    packed = [row.schedule for row in plan.considered if row.chosen]
    assert packed == ["packed"]


@few_and_many(8, 1000)
def test_plans_keep_limits_and_packing_never_costs(examples):
    @settings(max_examples=examples)
    @given(scheduled_demands(), st.booleans(), st.integers(0, 2))
    def check(case, stated, slots):
        """Two micro-batches are a group: a mini-batch."""
        demand, limit, per_node = case
        M, _, R, _ = demand.tokens_MLRE.shape
        demand = replace(demand, group_M=np.arange(M, dtype=np.int32) // 2)
        budget = Budget(slots=slots, rank_tokens=limit if stated else None)
        costs, given_S = [], demand.micro_batch_S >= 0
        for pack in (False, True):
            changed = replace(budget, pack_samples=pack)
            plan = plan_step(demand, cluster(R // per_node, per_node), changed, expert=SMALL, never_worse=False)
            before, after = (bins_of(one.micro_batch_S, one.rank_S, demand.length_S) for one in (demand, plan))
            most = limit if stated else max((sum(lengths) for lengths in before.values()), default=0)
            assert_within_limits(after, most, most_squares(before, most))
            assert (plan.micro_batch_S[given_S] // 2 == demand.micro_batch_S[given_S] // 2).all(), (
                "a sample left its group"
            )
            assert {m for m, _ in before} == {m for m, _ in after}
            costs.append(seconds_of(plan, budget))
        assert costs[1] <= costs[0] * (1 + 1e-9)

    check()


def test_packing_does_not_gather_long_samples_on_a_rank():
    """Samples of log-normal lengths, at most 2,048 tokens per rank: 13,769 were on a rank of 8,192 before."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(2048, rng.lognormal(5.5, 0.8, 400)).astype(np.int64)
    popularity = rng.lognormal(0, 0.75, (3, 1, 32))[rng.integers(3, size=400)] * rng.lognormal(0, 0.5, (400, 1, 32))
    counts = [rng.multinomial(4 * n, p[0] / p.sum())[None] for n, p in zip(lengths, popularity, strict=True)]
    demand = Demand(
        counts_SLE=np.array(counts, dtype=np.int32), layer_ids=np.arange(1), sample_ids=np.arange(400), top_k=4
    )
    schedule = make_schedule(lengths, np.arange(400), mini_batches=1, micro_batch_tokens=2048, num_ranks=16)
    demand = demand.with_schedule(schedule.micro_batch_S, schedule.rank_S, 16)
    budget = Budget(slots=1, rank_tokens=2048)
    plan = plan_step(demand, cluster(2, 8), budget, expert=SMALL, never_worse=False)
    stragglers = []
    for one in (demand, plan.scheduled(demand)):
        assert one.sum_per_rank(lengths).max() <= 2048
        attention_MR = one.sum_per_rank(lengths**2)
        stragglers.append(attention_MR.max(axis=1).sum() / attention_MR.mean(axis=1).sum())
    assert stragglers[1] < 1.25 * stragglers[0]


def test_a_schedule_beyond_the_stated_limit_is_refused():
    demand = make_demand(64, 2, 16, 2, 8, 0)
    assert max(len(lengths) for lengths in bins_of(demand.micro_batch_S, demand.rank_S, demand.length_S).values()) > 1
    with pytest.raises(PlanError, match=r"micro-batch \d: rank \d has \d+ tokens in \d samples, allowed are 40: "):
        plan_step(demand, cluster(1, 8), Budget(rank_tokens=40))
    with pytest.raises(PlanError, match="needs the choices per token: give the demand a top_k"):
        plan_step(replace(demand, top_k=None), cluster(1, 8), Budget(rank_tokens=4000))
    with pytest.raises(PlanError, match=r"rank_tokens is 0: .* greater than or equal to 1"):
        Budget(rank_tokens=0)


def test_slots_beyond_the_device_are_refused():
    demand, machine = make_demand(24, 2, 16, 4, 8, 0), replace(cluster(1, 8), memory_bytes=20_000_000)
    with pytest.raises(PlanError, match="replica slots for 2 experts take"):
        plan_step(demand, machine, Budget(slots=2), "ultraep", expert=SMALL, never_worse=False)


@pytest.mark.parametrize("balancer", ["relibra", "relibra_paper", "ultraep"])
def test_homes_that_must_not_move_stay_where_static_is_better(balancer):
    demand, other = make_demand(48, 2, 32, 4, 16, 1), make_demand(48, 2, 32, 4, 16, 2)
    before = plan_step(other, cluster(2, 8), Budget(slots=0), "relibra_paper_tokens", never_worse=False)
    assert before.num_moved > 0
    budget = Budget(slots=0, move_homes=False)
    plan = plan_step(demand, cluster(2, 8), budget, balancer, expert=SMALL, previous=before)
    assert plan.num_moved == 0
    free = plan_step(demand, cluster(2, 8), replace(budget, move_homes=True), balancer, expert=SMALL, previous=before)
    assert seconds_of(free, budget) <= seconds_of(plan, budget)


def test_without_sizes_a_plan_is_for_qwen3_and_names_it():
    demand, machine = make_demand(24, 2, 16, 4, 8, 0, tokens=2048), cluster(1, 8)
    assumed, given_sizes = plan_step(demand, machine), plan_step(demand, machine, expert=SMALL)
    assert (assumed.assumed_model, given_sizes.assumed_model) == ("qwen3-30b-a3b", "")
    assert assumed.digest() == given_sizes.digest()
    assert assumed.predicted == given_sizes.predicted


def test_half_of_what_experts_leave_of_the_device_is_for_slots():
    demand, machine = make_demand(8, 3, 16, 2, 8, 0), cluster(1, 8)
    at_home = 2 * 3 * SMALL.parameters * 18  # two experts in each of three layers
    assert memory_beside_experts(demand, machine, SMALL) == pytest.approx((machine.memory_bytes - at_home) / 2**31)
    assert memory_beside_experts(demand, replace(machine, memory_bytes=at_home), SMALL) == 0


def test_bare_homes_replace_a_dearer_plan():
    """A few tokens of large experts: pushes cost more than they save, in the plan of any balancer."""
    demand, machine = make_demand(16, 2, 16, 4, 8, 0, tokens=2), replace(cluster(2, 4), hides_copies=False)
    expert = EXPERT_SHAPES["mixtral-8x7b"]
    dear = plan_step(demand, machine, Budget(slots=1), "ultraep", expert=expert, never_worse=False)
    plan = plan_step(demand, machine, Budget(slots=1), "ultraep", expert=expert)
    assert dear.num_copies > 0 == plan.num_copies
    assert plan.predicted["total"] < dear.predicted["total"]
    assert plan.balancer == "static (instead of ultraep)"
    moved = plan_step(demand, machine, Budget(), "relibra_paper_tokens", expert=expert, never_worse=False)
    kept = plan_step(demand, machine, Budget(move_homes=False), "ultraep", expert=expert, previous=moved)
    assert kept.balancer == "homes kept (instead of ultraep)"


def test_loads_beyond_32_bits_and_foreign_histories_are_refused():
    demand, machine = make_demand(3, 1, 4, 1, 2, 0), cluster(1, 2)
    heavy = replace(demand, counts_SLE=np.full((3, 1, 4), 1 << 30, dtype=np.int32))
    with pytest.raises(TraceError, match="2\\^31 token-slots or more"):
        heavy.with_schedule(demand.micro_batch_S, demand.rank_S, 2)
    with pytest.raises(PlanError, match=r"the history has shape \(2, 1, 8\)"):
        plan_step(demand, machine, history_MLE=np.ones((2, 1, 8), dtype=np.int64))


def test_misfits_get_a_sentence():
    demand, machine = make_demand(8, 2, 16, 2, 8, 0), cluster(1, 8)
    with pytest.raises(PlanError, match="scheduled on 8 ranks, cluster 'h100x8' has 4"):
        plan_step(demand, cluster(1, 4))
    odd = make_demand(8, 2, 18, 2, 8, 0)
    with pytest.raises(PlanError, match=r"18 experts .* 8 ranks"):
        plan_step(odd, machine)
    with pytest.raises(PlanError, match="balancer 'best' is unknown: allowed are static, "):
        plan_step(demand, machine, balancer="best")
    values = [{"slots": -1}, {"slots": 65}, {"slots": True}, {"memory_gib": -1.0}]
    values += [{"tolerance": float("nan")}, {"tolerance": 11.0}, {"steps_served": 0}]
    for wrong in values:
        with pytest.raises(PlanError):
            Budget(**wrong)


def test_no_micro_batch_at_all():
    demand = make_demand(4, 2, 8, 2, 4, 0)
    nothing = demand.with_schedule(np.full(4, -1, dtype=np.int32), np.zeros(4, dtype=np.int32), 4)
    for name in BALANCERS:
        plan = plan_step(nothing, cluster(1, 4), Budget(slots=1), name)
        validate_plan(plan, cluster(1, 4).topology, nothing)
        assert plan.skew(nothing) == 1.0


def test_groups_that_share_experts_get_the_same_homes():
    groups = [make_demand(32, 3, 32, 4, 16, seed) for seed in (1, 2)]
    machine, budget = cluster(2, 8), Budget(slots=1)
    together = ScheduledDemand.of_groups(groups)
    assert (together.tokens_MLRE[4:] == groups[1].tokens_MLRE).all()
    options = {"balancer": "relibra_paper_tokens", "expert": SMALL, "never_worse": False}
    plan = plan_step(together, machine, budget, **options)
    validate_plan(plan, machine.topology, together)
    alone = [plan_step(group, machine, budget, **options) for group in groups]
    assert (alone[0].home_LE != alone[1].home_LE).any()
    foreign = [
        plan_step(group, machine, replace(budget, move_homes=False), previous=other, **options)
        for group, other in zip(groups, alone[::-1], strict=True)
    ]
    loads = [made.rank_load(group) for group, made in zip(groups, foreign, strict=True)]
    assert plan.rank_load(together).max(axis=2).sum() <= sum(load_MLR.max(axis=2).sum() for load_MLR in loads)
    with pytest.raises(TraceError, match="same layers, ranks"):
        ScheduledDemand.of_groups([groups[0], make_demand(8, 3, 32, 2, 8, 0)])


def test_a_plan_for_hierarchical_dispatch_is_cheaper_there():
    """Four choices per token on 4 nodes of 4: many share a node, and home search and replicas know the prices."""
    shape = TraceShape(rows_per_sample=[200] * 64, num_layers=2, num_experts=64, top_k=8)
    trace = domain_trace(shape, np.random.default_rng(0), num_domains=4)
    demand, flat = cut_recorded(trace, 400, 16), cluster(4, 4)
    demand = replace(demand, pairs_LEE=co_activation(trace))
    hierarchical = replace(flat, dispatch="hierarchical")
    budget = Budget(slots=2)
    own, other = (plan_step(demand, machine, budget, expert=SMALL) for machine in (hierarchical, flat))
    assert (own.dispatch, other.dispatch) == ("hierarchical", "flat")
    other = replace(other, dispatch="hierarchical")
    prices = [predict(plan, plan.scheduled(demand), hierarchical, SMALL).total for plan in (own, other)]
    assert prices[0] == pytest.approx(own.predicted["total"])
    assert prices[0] <= prices[1]
    static = StepPlan.static(demand, flat.topology, dispatch="hierarchical")
    assert rows_per_crossing(flat, demand, static.home_LE) == 1.0
    assert rows_per_crossing(hierarchical, replace(demand, pairs_LEE=None), static.home_LE) == 1.0
    share = rows_per_crossing(hierarchical, demand, static.home_LE)
    once = predict(static, demand, hierarchical, SMALL)
    rows = once.bytes.rows.between / SMALL.row_bytes
    assert rows / (4 * once.cross_node_token_slots) == pytest.approx(share, rel=0.02)


def test_arguments_of_other_types_end_in_one_sentence():
    """In a process of its own: here types are checked at every call."""
    program = (
        "from relibra import PlanError, cluster_preset, demo_demand, plan_step\n"
        "demand, cluster = demo_demand(16), cluster_preset('h100x8', 16)\n"
        "for wrong in ((demand.counts_SLE, cluster), (demand, 'h100x8'), (demand, cluster, 'eplb')):\n"
        "    try: plan_step(*wrong)\n"
        "    except PlanError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line[:2] for line in done.stdout.splitlines()] == ["a "] * 3
