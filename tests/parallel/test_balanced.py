"""Training by plan on several processes equals training without any parallelism, and refuses what it cannot do."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parallel.against_dense import assert_equals_dense
from tests.parallel.ranks_at_work import on_ranks
from tests.parallel.steps import of_experts, random_step, step


def test_a_planned_step_equals_the_dense_model(tmp_path):
    cases = {
        "fast": step(unrouted_last=True, ahead=True),
        "canonical, checkpointed": step(sums="canonical", checkpointing=True),
    }
    assert all((case.plan.quota_MLRB > 0).any() for case in cases.values())
    for name, results_R in on_ranks(2, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_planned_steps_equal_the_dense_model(tmp_path):
    cases = {
        "qwen3": step(),
        "qwen3, checkpointed": step(checkpointing=True),
        "qwen3, last tokens without routes": step(
            lengths=(9, 4, 7, 10, 3), schedule=([0, 0, 1, 1, 1], [0, 1, 0, 0, 1]), unrouted_last=True
        ),
        "qwen3, few last tokens without routes": step(lengths=(90, 81, 88, 79), unrouted_last=True, slots=2),
        "gpt-oss, few last tokens, checkpointed": step(
            family="gpt_oss",
            lengths=(90, 71, 88, 79, 61),
            schedule=([0, 0, 1, 1, 1], [0, 1, 1, 1, 0]),
            unrouted_last=True,
            checkpointing=True,
        ),
        "qwen3, two in flight": step(in_flight=True),
        "qwen3, two in flight, checkpointed": step(in_flight=True, checkpointing=True),
        "mixtral": step(family="mixtral", slots=2),
        "gpt-oss": step(family="gpt_oss"),
        "gpt-oss, last tokens without routes, checkpointed": step(
            family="gpt_oss", unrouted_last=True, checkpointing=True
        ),
        "deepseek-v3, first layer dense": step(family="deepseek_v3", layer_ids=(1, 2), top_k=3, checkpointing=True),
    }
    assert all((case.plan.quota_MLRB > 0).any() for case in cases.values())
    for name, results_R in on_ranks(2, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_plans_at_the_edge_equal_the_dense_model(tmp_path):
    everything_to_rank_0 = [(0, slot, 4 + slot, 1.0) for slot in range(4)]
    one_hot = of_experts([np.tile([5, 0], (n, 3, 1)) for n in (9, 12)])
    cases = {
        "all replicas on one rank, the other gets no row": step(replicas=everything_to_rank_0),
        "the same, checkpointed": step(replicas=everything_to_rank_0, checkpointing=True),
        "a home without tokens": step(replicas=[(1, 0, 0, 1.0)]),
        "an idle replica": step(replicas=[(1, 0, 0, 0.0), (0, 0, 7, 0.5)]),
        "one expert with all tokens": step(trace=one_hot, schedule=([0, 0], [0, 1]), replicas=[(0, 0, 5, 0.5)]),
        "no slots": step(slots=0),
        "no slots, canonical": step(slots=0, sums="canonical"),
        "all replicas on one rank, canonical": step(replicas=everything_to_rank_0, sums="canonical"),
        "an idle replica, canonical": step(replicas=[(1, 0, 0, 0.0), (0, 0, 7, 0.5)], sums="canonical"),
        "a rank without samples": step(schedule=([0, 0, 1, 1], [0, 0, 0, 1])),
        "no row travels": step(replicas=everything_to_rank_0, schedule=([0, 0, 1, 1], [0, 0, 0, 0])),
        "no row travels, checkpointed, canonical": step(
            replicas=everything_to_rank_0, schedule=([0, 0, 1, 1], [0, 0, 0, 0]), checkpointing=True, sums="canonical"
        ),
    }
    for name, results_R in on_ranks(2, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_random_plans_equal_the_dense_model(tmp_path):
    cases = {f"seed {seed}": random_step(seed, 2) for seed in range(8)}
    cases |= {f"seed {seed}, canonical": replace(random_step(seed, 2), sums="canonical") for seed in range(8, 12)}
    for name, results_R in on_ranks(2, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_four_ranks_and_two_groups_equal_the_dense_model(tmp_path):
    schedule = ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    four = step(4, lengths=range(5, 13), schedule=schedule, slots=2, checkpointing=True)
    spread = step(
        4, lengths=range(5, 13), schedule=schedule, replicas=[(r, 0, 0, 0.3) for r in (1, 2, 3)] + [(0, 0, 6, 0.9)]
    )
    groups = step(2, lengths=range(5, 13), schedule=([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4))
    cases = {"four": four, "one expert everywhere": spread, "two groups of two": replace(groups, num_ranks=4)}
    for name, results_R in on_ranks(4, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_without_a_plan_it_is_all_to_all(tmp_path):
    case = replace(step(), follow_plan=False)
    cases = {"relibra": case, "all_to_all": replace(case, implementation="all_to_all")}
    found = on_ranks(2, cases, tmp_path)
    for ours, theirs in zip(found["relibra"], found["all_to_all"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
