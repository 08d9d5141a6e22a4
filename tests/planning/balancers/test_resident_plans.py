"""Plans with resident slots: how even on recorded routes, with how many pushes; what they save; where homes go."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.steps import domain_step
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import pushed_copies
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.costs.prediction import predict
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.config.settings import PlanSettings
from relibra.routing.micro_batches import cut_recorded, select_micro_batches
from relibra.routing.readers import open_trace

DATA = Path(__file__).parents[4] / "shared" / "data"
RECORDED = {
    "gpt-oss-20b": ("gpt_oss_20b_decode_topk.npz", 32, 2048),
    "deepseek-v2-lite": ("deepseek_v2_lite_esft_topk.npz", 64, 1024),
}
QWEN = EXPERT_SHAPES["qwen3-30b-a3b"]


def pushes_of(plan):
    """Return the pushes before forward per micro-batch and layer."""
    return pushed_copies(plan)[0].sum(axis=(2, 3)).mean()


@pytest.mark.skipif(not DATA.is_dir(), reason=f"recorded routes of real models are not there ({DATA})")
@pytest.mark.parametrize(
    ("model", "ranks", "cross_node", "skew", "pushes"),
    [
        ("gpt-oss-20b", 8, False, 1.015, 0.9),
        ("gpt-oss-20b", 32, False, 1.067, 2.6),
        ("gpt-oss-20b", 32, True, 1.015, 3.1),
        ("deepseek-v2-lite", 32, True, 1.013, 4.6),
    ],
)
def test_two_resident_slots_on_recorded_routes(model, ranks, cross_node, skew, pushes):
    """The later half of the recording, in recorded order."""
    file, experts, tokens = RECORDED[model]
    whole = cut_recorded(open_trace(DATA / file, experts), tokens, ranks)
    demand = select_micro_batches(whole, len(whole.load_MLE) // 2)
    budget = Budget(slots=2, resident_slots=2, objective="tokens", tolerance=0.01, cross_node_copies=cross_node)
    plan = plan_step(demand, cluster_preset("h100x8", ranks), budget, expert=EXPERT_SHAPES[model])
    assert plan.resident
    assert plan.skew(plan.scheduled(demand)) <= skew
    assert pushes_of(plan) <= pushes


@pytest.mark.skipif(not DATA.is_dir(), reason=f"recorded routes of real models are not there ({DATA})")
def test_few_copies_in_shared_slots_on_recorded_routes():
    whole = cut_recorded(open_trace(DATA / "gpt_oss_20b_decode_topk.npz", 32), 2048, 8)
    demand = select_micro_batches(whole, len(whole.load_MLE) // 2)
    plan = plan_step(
        demand, cluster_preset("h100x8", 8), Budget(slots=1, resident_slots=0, objective="tokens", tolerance=0.01)
    )
    assert plan.skew(plan.scheduled(demand)) <= 1.011
    assert pushes_of(plan) <= 5.0


def small_step(step=0, *, ranks=16, micro_batches=16, tokens=2048, seed=0):
    return domain_step(
        ranks=ranks, layers=2, experts=64, micro_batches=micro_batches, samples=ranks * micro_batches, tokens=tokens,
        seed=seed, step=step,
    )  # fmt: skip


@pytest.mark.parametrize(("slots", "share"), [(2, 0.9), (4, 0.75)])
def test_resident_slots_save_seconds_against_shared_ones(slots, share):
    demand, machine = small_step(), cluster_preset("h100x8", 16)
    totals = []
    for resident in (0, slots):
        budget = Budget(slots=slots, resident_slots=resident, objective="seconds", cross_node_copies=True)
        plan = plan_step(demand, machine, budget, expert=QWEN)
        totals.append(plan.predicted["total"] - plan.predicted["attention"])
    assert totals[1] <= share * totals[0]


def test_groups_choose_replicas_one_by_one_and_push_less_where_nothing_hides_pushes():
    """With one micro-batch per optimizer step no replica is used twice: few are worth a push that ranks wait for."""
    demand = replace(small_step(ranks=2, micro_batches=4, tokens=64), group_M=np.arange(4, dtype=np.int32))
    budget = Budget(slots=2, resident_slots=2, objective="seconds")
    hidden = cluster_preset("laptop", 2)
    plans = [plan_step(demand, replace(hidden, hides_copies=hides), budget, expert=QWEN) for hides in (True, False)]
    static, planned = (StepPlan.static(demand, hidden.topology), plans[1])
    assert pushes_of(plans[1]) < pushes_of(plans[0])
    totals = [
        predict(plan, plan.scheduled(demand), replace(hidden, hides_copies=False), QWEN).total
        for plan in (planned, static)
    ]
    assert totals[0] < totals[1]


def test_a_plan_has_as_many_slots_as_are_resident():
    demand, machine = small_step(), cluster_preset("h100x8", 16)
    plan = plan_step(demand, machine, Budget(slots=3, resident_slots=1, objective="tokens", tolerance=0.0))
    assert (plan.resident, plan.slots) == (True, 1)
    validate_plan(plan, machine.topology, demand)
    assert not pushed_copies(plan)[1].any()


@pytest.mark.parametrize("objective", ["tokens", "seconds"])
@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("cross_node", [False, True])
def test_homes_stay_in_a_second_step_of_the_same_popularity(objective, resident, cross_node):
    machine = cluster_preset("h100x8", 16)
    budget = Budget(
        slots=2,
        resident_slots=resident,
        objective=objective,
        tolerance=0.01,
        cross_node_copies=cross_node,
        steps_served=10,
    )
    first = plan_step(small_step(0), machine, budget, expert=QWEN)
    second = plan_step(small_step(1), machine, budget, expert=QWEN, previous=first)
    assert second.num_moved <= 0.05 * second.home_LE.size


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "changes"),
    [(16, 4, {}), (16, 12, {}), (32, 8, {"pack": False}), (16, 8, {"memory_gib": 0.0})],
)
def test_a_second_step_of_the_same_popularity_stays_and_one_of_another_moves(ranks, micro_batches, changes, seed):
    """As training plans by default; the second step never costs more than staying."""
    machine, budget = (
        cluster_preset("h100x8", ranks),
        plan_budget(PlanSettings(**changes), 8.0),
    )
    sizes = {"ranks": ranks, "micro_batches": micro_batches, "tokens": 1024}
    first = plan_step(small_step(seed=seed, **sizes), machine, budget, expert=QWEN)
    for popularity in (seed, seed + 100):
        demand = small_step(1, seed=popularity, **sizes)
        second, stay = (
            plan_step(demand, machine, replace(budget, move_homes=moves), expert=QWEN, previous=first)
            for moves in (True, False)
        )
        moving = second.predicted["relocation"] * (1 - 1 / budget.steps_served)
        assert second.predicted["total"] - moving <= stay.predicted["total"] * (1 + 1e-9)
        if popularity == seed:
            assert second.num_moved <= 0.05 * second.home_LE.size


def test_homes_move_with_the_popularity_where_that_pays():
    """Of five other popularities, some ask for other homes. With more slots hardly any does: homes hardly matter."""
    machine = cluster_preset("h100x8", 16)
    budget = plan_budget(PlanSettings(slots=2), 8.0)
    first = plan_step(small_step(), machine, budget, expert=QWEN)
    moved = []
    for popularity in (100, 200, 300, 400, 500):
        demand = small_step(1, seed=popularity)
        plan = plan_step(demand, machine, budget, expert=QWEN, previous=first)
        if plan.num_moved:
            stay = plan_step(demand, machine, replace(budget, move_homes=False), expert=QWEN, previous=first)
            moved.append(plan.predicted["total"] - plan.predicted["relocation"] < stay.predicted["total"])
    assert len(moved) >= 2
    assert all(moved)


def test_moves_are_charged_to_the_steps_that_they_serve():
    demand, machine = small_step(tokens=256), cluster_preset("h100x8", 16)
    moved = [
        plan_step(
            demand, machine, Budget(slots=1, resident_slots=0, objective="seconds", steps_served=steps), expert=QWEN
        ).num_moved
        for steps in (1, 1000)
    ]
    assert moved[0] < moved[1]


def test_slots_are_resident_as_far_as_memory_allows():
    one = (QWEN.weight_bytes + QWEN.gradient_bytes) / 2**30
    for memory, resident in ((0.0, 0), (2.99 * one, 0), (48 * one, 0), (49.01 * one, 1), (96.01 * one, 2)):
        assert Budget(slots=2, memory_gib=memory).with_resident_slots(QWEN, 48).resident_slots == resident
    assert Budget(slots=2, resident_slots=1, memory_gib=0.0).with_resident_slots(QWEN, 48).resident_slots == 1
    plan = plan_step(small_step(micro_batches=2), cluster_preset("h100x8", 16), Budget(slots=2, memory_gib=0.0))
    assert not plan.resident


def test_threads_change_nothing():
    demand, machine = small_step(micro_batches=6), cluster_preset("h100x8", 16)
    digests = {
        plan_step(
            demand, machine, Budget(slots=3, resident_slots=2, threads=threads, cross_node_copies=True), expert=QWEN
        ).digest()
        for threads in (1, 2, 5)
    }
    assert len(digests) == 1


def test_a_plan_is_never_slower_than_staying():
    """Small loads of large experts: replicas and moves cost more than they save."""
    demand, machine = small_step(tokens=16), cluster_preset("h100x8", 16)
    given = {"expert": EXPERT_SHAPES["mixtral-8x7b"], "previous": plan_step(small_step(1), machine, Budget(slots=0))}
    plan = plan_step(demand, machine, Budget(slots=2, objective="seconds", cross_node_copies=True), **given)
    stay = Budget(slots=0, objective="seconds", move_homes=False)
    assert plan.predicted["total"] <= plan_step(demand, machine, stay, "static", **given).predicted["total"]


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_second_step_of_few_micro_batches_keeps_homes(micro_batches):
    """Too few to choose homes from some and price them in others."""
    machine = cluster_preset("h100x8", 16)
    budget = Budget(slots=4, resident_slots=0, objective="seconds", cross_node_copies=True, steps_served=10)
    first = plan_step(small_step(0, micro_batches=micro_batches), machine, budget, expert=QWEN)
    demand = small_step(1, micro_batches=micro_batches)
    second = plan_step(demand, machine, budget, expert=QWEN, previous=first)
    validate_plan(second, machine.topology, demand)
    assert second.num_moved == 0
