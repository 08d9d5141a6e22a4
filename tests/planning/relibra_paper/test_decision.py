"""ReLibra's levers as a balancer: never worse than homes kept by its objective; token-slots of recordings."""

from dataclasses import replace

import pytest

from benchmarks.harness.recorded_cuts import cut_recorded
from benchmarks.planner.steps import domain_step
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.planner import plan_step
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace
from tests.examples import quick_and_slow
from tests.planning.cases import DATA

EXPERT = EXPERT_SHAPES["qwen3-30b-a3b"]


def plan_of(demand, machine, balancer, **changes):
    budget = Budget(**{"slots": 1, **changes})
    return plan_step(demand, machine, budget, balancer, expert=EXPERT, never_worse=False)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
def test_annealed_homes_are_never_worse_than_homes_kept(seed, slots, dispatch):
    machine = replace(cluster_preset("h100x8", 16), dispatch=dispatch)
    demand = domain_step(ranks=16, layers=2, experts=64, micro_batches=8, samples=256, tokens=512, seed=seed)
    moved, kept = (plan_of(demand, machine, "relibra_paper", slots=slots, move_homes=moves) for moves in (True, False))
    seconds = moved.predicted["total"] - 0.9 * moved.predicted["relocation"]
    assert seconds <= kept.predicted["total"] * 1.001
    tokens = [
        plan_of(demand, machine, "relibra_paper_tokens", slots=slots, move_homes=moves) for moves in (True, False)
    ]
    skews = [plan.skew(plan.scheduled(demand)) for plan in tokens]
    assert skews[0] < skews[1]
    assert kept.num_moved == tokens[1].num_moved == 0 < tokens[0].num_moved
    assert {plan.num_cross_node_copies for plan in (moved, kept, *tokens)} == {0}


@pytest.mark.skipif(not DATA.is_dir(), reason=f"recorded routes of real models are not there ({DATA})")
@quick_and_slow(("ranks", "skew"), [(8, 1.01)], [(16, 1.03), (32, 1.08)])
def test_token_slots_of_a_recording_are_even_with_one_slot(ranks, skew):
    """The later half of gpt-oss, 2,048 tokens of a micro-batch in recorded order."""
    whole = cut_recorded(open_trace(DATA / "gpt_oss_20b_decode_topk.npz", 32), 2048, ranks)
    demand = select_micro_batches(whole, len(whole.load_MLE) // 2)
    plan = plan_of(demand, cluster_preset("h100x8", ranks), "relibra_paper_tokens")
    assert plan.skew(plan.scheduled(demand)) <= skew + 0.005
