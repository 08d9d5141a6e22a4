"""Training under plans: the weights of the dense model after AdamW, and with canonical sums the same bits under all."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from relibra.parallel.canonical import CHUNK

from .ranks_at_work import on_ranks
from .steps import random_step, step
from .trainings import moved, plans_of, train_dense, train_on_rank

pytestmark = pytest.mark.slow


def losses(results_R):
    return np.sum([result["losses"] for result in results_R], axis=0)


def test_three_steps_of_adamw_give_the_weights_of_the_dense_model(tmp_path):
    cases = {}
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        sizes = {"layer_ids": (1, 2), "top_k": 3} if family == "deepseek_v3" else {}
        case = step(family=family, **sizes)
        case = replace(case, num_steps=3, plans=plans_of(case, moved(case, 1), moved(case, 2)))
        cases |= {family: case, f"{family}, canonical": replace(case, sums="canonical", checkpointing=True)}
    for name, results_R in on_ranks(2, cases, tmp_path, train_on_rank).items():
        expected = train_dense(cases[name])
        np.testing.assert_allclose(losses(results_R), expected["losses"], rtol=1e-5)
        for result in results_R:
            for parameter, weight in expected["weights"].items():
                torch.testing.assert_close(
                    result["weights"][parameter], weight, rtol=1e-5, atol=1e-5, msg=f"{name}: {parameter}"
                )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_canonical_sums_have_the_same_bits_under_every_plan_of_a_schedule(tmp_path, num_ranks):
    lengths = [360, 280, 480, 300, 240, 320, 400, 260]
    schedule = ([0] * 4 + [1] * 4, [r % num_ranks for r in range(4)] * 2)
    common = {"lengths": lengths, "schedule": schedule, "unrouted_last": True, "family": "gpt_oss"}
    planner = step(num_ranks, slots=2, **common)
    cases = {
        "static": step(num_ranks, slots=0, **common),
        "planner": planner,
        "everything on rank 0": step(num_ranks, replicas=[(0, s, 8 // num_ranks + s, 1.0) for s in range(4)], **common),
        "checkpointed": replace(planner, checkpointing=True),
        "moved": moved(planner, 3),
    }
    cases = {name: replace(case, num_steps=3, sums="canonical", plans=plans_of(case)) for name, case in cases.items()}
    cases["moving"] = replace(
        planner, num_steps=3, sums="canonical", plans=plans_of(*(moved(planner, s) for s in range(3)))
    )
    found = on_ranks(num_ranks, cases, tmp_path, train_on_rank)
    expected = found["static"]
    assert planner.plan.quota_MLRB.max() > CHUNK  # an expert's chunks are shared out
    for name, results_R in found.items():
        for rank, result in enumerate(results_R):
            assert result["losses"] == expected[rank]["losses"], name
            for parameter, weight in expected[0]["weights"].items():
                assert torch.equal(result["weights"][parameter], weight), (name, rank, parameter)


def test_a_hundred_steps_follow_the_curve_of_all_to_all(tmp_path):
    case = step(slots=2)
    plans = plans_of(*(moved(case, seed) for seed in range(10)))
    cases = {
        "relibra": replace(case, num_steps=100, plans=plans),
        "all_to_all": replace(case, num_steps=100, plans=plans[:1], follow_plan=False, implementation="all_to_all"),
    }
    found = on_ranks(2, cases, tmp_path, train_on_rank)
    curve = losses(found["all_to_all"])
    assert curve[-1] < 0.5 * curve[0]
    np.testing.assert_allclose(losses(found["relibra"]), curve, rtol=1e-4)


def test_eight_ranks_with_one_expert_each(tmp_path):
    spread = step(
        8, lengths=range(5, 13), schedule=([0] * 8, list(range(8))), replicas=[(r, 0, 0, 0.1) for r in range(1, 8)]
    )
    idle = step(8, lengths=(9, 12), schedule=([0, 0], [3, 5]), slots=1)
    cases = {
        "one expert everywhere": replace(spread, num_steps=2, plans=plans_of(spread)),
        "six ranks without samples": replace(idle, num_steps=2, plans=plans_of(idle, moved(idle, 1))),
    }
    for name, results_R in on_ranks(8, cases, tmp_path, train_on_rank).items():
        expected = train_dense(cases[name])
        np.testing.assert_allclose(losses(results_R), expected["losses"], rtol=1e-5)
        for parameter, weight in expected["weights"].items():
            torch.testing.assert_close(results_R[5]["weights"][parameter], weight, rtol=1e-5, atol=1e-5, msg=parameter)


def test_bf16_is_as_close_to_single_precision_as_all_to_all(tmp_path):
    cases = {}
    for name, case in {"planner": step(slots=2), "random": random_step(3, 2)}.items():
        one = replace(case, num_steps=1, plans=plans_of(case), dtype="bfloat16", checkpointing=False, in_flight=False)
        cases |= {name: one, f"{name}, canonical": replace(one, sums="canonical")}
        cases[f"{name}, all_to_all"] = replace(one, follow_plan=False, implementation="all_to_all")
    found = on_ranks(2, cases, tmp_path, train_on_rank)
    for name in ("planner", "random"):
        exact = train_dense(replace(cases[name], dtype="float32"))
        error = {
            kind: abs(losses(found[name + kind])[0] - exact["losses"][0]) / exact["losses"][0]
            for kind in ("", ", canonical", ", all_to_all")
        }
        assert max(error.values()) < 2e-2
