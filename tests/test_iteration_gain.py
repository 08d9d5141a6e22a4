"""Gains of an RL iteration, which the tables of other papers have."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.iteration_gain import STAGES, needed_stage_speedup, rl_iteration, speedup
from relibra import Budget, cluster_preset, plan_step
from relibra.simulation import Engines, Execution, model_shape, simulate_rollout, simulate_step
from tests.planning.cases import make_demand

MODEL = replace(model_shape("qwen3-30b-a3b"), moe_layers=4, experts=32, top_k=4)
CLUSTER = cluster_preset("h100x8", 16)
ENGINES = Engines(num_engines=2, ranks=8, slots=16)


def iteration(balancer):
    demand = make_demand(64, 4, 32, 8, 16, 1, sigma=1.5, tokens=4000)
    plan = plan_step(demand, CLUSTER, Budget(slots=2), balancer, expert=MODEL.expert)
    demand = plan.scheduled(demand)
    update = simulate_step(plan, demand, CLUSTER, MODEL, Execution(mini_batches=2))
    recompute = simulate_step(plan, demand, CLUSTER, MODEL, Execution(forward_only=True))
    lengths_S = demand.counts_SLE[:, 0].sum(axis=1) // MODEL.top_k
    rollout = simulate_rollout(lengths_S.astype(np.int64), 500.0, ENGINES, MODEL, CLUSTER)
    return rl_iteration(rollout, update, MODEL, CLUSTER, ENGINES, recompute=recompute, reward_seconds=0.25), update


def test_an_iteration_is_its_stages_one_after_another():
    one, update = iteration("relibra")
    assert tuple(one.stages) == STAGES
    assert one.seconds == pytest.approx(sum(one.stages.values()))
    assert one.stages["update"] + one.stages["relocation"] == pytest.approx(update.seconds)
    assert one.stages["reward"] == 0.25
    assert 0 < one.stages["recompute"] < one.stages["update"]
    assert one.figures()["rollout_share"] == one.share("rollout") == pytest.approx(one.stages["rollout"] / one.seconds)


def test_training_gets_faster_and_the_whole_by_less():
    before, after = iteration("static")[0], iteration("relibra")[0]
    gain = speedup(before, after)
    assert gain.stages["update"] > gain.end_to_end > 1
    assert gain.training > gain.end_to_end
    assert gain.stages["rollout"] == gain.stages["weight sync"] == 1
    assert gain.rollout_share == before.share("rollout")
    assert f"training {gain.training:.2f}x, end to end {gain.end_to_end:.2f}x" in str(gain)


def test_a_known_end_to_end_gain_needs_more_of_the_stages():
    assert needed_stage_speedup(1.45, 0.7) == float("inf")
    assert needed_stage_speedup(1.45, 0.0) == pytest.approx(1.45)
