"""Training under plans: the weights of the dense model after AdamW, and with canonical sums the same bits under all."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from relibra.parallel.canonical import CHUNK
from relibra.planning.traffic.rank_tables import rank_tables
from tests.parallel import ranks_at_work
from tests.parallel.against_dense import (
    assert_equals_dense,
    assert_same_bits_of_training,
    assert_same_training,
    losses,
    relative_error,
    rounded,
)
from tests.parallel.ranks_at_work import dense_step, on_ranks
from tests.parallel.steps import step
from tests.parallel.trainings import (
    moved,
    plans_of,
    step_with_a_slow_rank,
    train_dense,
    train_on_rank,
    watched_step,
)

pytestmark = pytest.mark.slow


def test_three_steps_of_adamw_give_the_dense_weights(tmp_path):
    cases = {}
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        sizes = {"layer_ids": (1, 2), "top_k": 3} if family == "deepseek_v3" else {}
        case = step(family=family, **sizes)
        case = replace(case, num_steps=3, plans=plans_of(case, moved(case, 1), moved(case, 2)))
        cases |= {family: case, f"{family}, canonical": replace(case, sums="canonical", checkpointing=True)}
    for name, results_R in on_ranks(2, cases, tmp_path, train_on_rank).items():
        assert_same_training(train_dense(cases[name]), results_R, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_canonical_sums_have_the_same_bits_under_every_plan(tmp_path, num_ranks):
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
    assert planner.plan.quota_MLRB.max() > CHUNK  # an expert's chunks are shared out
    for name, results_R in found.items():
        assert_same_bits_of_training(found["static"], results_R, name)


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
        assert_same_training(train_dense(cases[name]), results_R, name)


def test_bf16_gradients_are_as_good_as_those_of_all_to_all(tmp_path):
    steps = {"planner": step(slots=2), "everything on rank 0": step(replicas=[(0, s, 4 + s, 1.0) for s in range(4)])}
    cases = {}
    for name, case in steps.items():
        case = replace(case, dtype="bfloat16")
        theirs = replace(case, follow_plan=False, implementation="all_to_all")
        cases |= {
            (name, "fast"): case,
            (name, "canonical"): replace(case, sums="canonical"),
            (name, "all_to_all"): theirs,
        }
    found = on_ranks(2, {" ".join(key): case for key, case in cases.items()}, tmp_path)
    for name, case in steps.items():
        with mock.patch.object(ranks_at_work, "tiny_model", rounded):
            exact = dense_step(case)["gradients"]
        error = {kind: relative_error(found[f"{name} {kind}"], exact) for kind in ("fast", "canonical", "all_to_all")}
        assert 1e-4 < error["all_to_all"] < 0.1, error
        assert max(error["fast"], error["canonical"]) <= 1.5 * error["all_to_all"], error


STAGES = {"prepare", "wait prepare", "push", "wait push", "return", "wait return", "dispatch", "combine", "at home"}
BYTES_OF_EXPERT = (2 * 16 * 32 + 32 * 16) * 4  # gate and up, down, float32


def of(timeline, stage, micro_batch, layer):
    """Events of a stage in the order of their beginnings."""
    events = [e for e in timeline.events if (e.stage, e.micro_batch, e.layer) == (stage, micro_batch, layer)]
    return sorted(events, key=lambda event: event.start)


def test_slots_hold_the_weights_of_homes_in_time(tmp_path):
    replicas = [(1, 0, 0, 0.5), (1, 1, 3, 0.5), (0, 0, 6, 0.5)]
    cases = {"plain": step(replicas=replicas), "checkpointed": step(replicas=replicas, checkpointing=True)}
    for name, results_R in on_ranks(2, cases, tmp_path, watched_step).items():
        assert_equals_dense(cases[name], results_R)
        for rank, result in enumerate(results_R):
            assert_slots_are_right(result)
            assert_weights_moved_as_planned(cases[name], rank, result["timeline"])
            assert_next_weights_came_early(cases[name], rank, result["timeline"])


def assert_slots_are_right(result, *, of_layers=False):
    assert result["interrupted"] == "in layer 1"
    assert result["wrong"] == []
    assert result["compared"]["forward"]
    assert result["compared"]["backward"]
    assert of_layers or len(result["memory"]) == 2  # two parameters, in all layers, micro-batches and contexts
    assert result["tracked"] == set()


def assert_weights_moved_as_planned(case, rank, timeline):
    """Forward and backward, but the last layer's weights are still there when the backward pass begins."""
    assert {event.stage for event in timeline.events} <= STAGES
    waits = sum(
        event.seconds for event in timeline.events if event.stage in ("wait prepare", "wait push", "wait return")
    )
    assert timeline.exposed_seconds()[rank] == pytest.approx(waits)
    for m, layer in np.ndindex(2, 3):
        tables = rank_tables(case.plan, case.demand, rank, m, layer)
        pushes, returns = of(timeline, "push", m, layer), of(timeline, "return", m, layer)
        assert len(pushes) == len(of(timeline, "wait push", m, layer)) == 1 + (layer < 2)
        assert {event.bytes for event in pushes} == {len(tables.pushes_from_here) * BYTES_OF_EXPERT}
        assert len(returns) == len(of(timeline, "wait return", m, layer)) == 1
        assert returns[0].bytes == len(tables.pushes_to_here) * BYTES_OF_EXPERT
        dispatch, combine = of(timeline, "dispatch", m, layer), of(timeline, "combine", m, layer)
        assert len(dispatch) == 3 + 2 * case.checkpointing  # rows and gate weights, and the gradients of results
        assert len(combine) == 3 + case.checkpointing
        rows, weights = dispatch[0].bytes // (4 * 32), dispatch[1].bytes // 4
        assert weights == tables.send_RP[1 - rank].sum()
        assert 0 < rows <= weights


def assert_next_weights_came_early(case, rank, timeline):
    for m, layer in np.ndindex(2, 2):
        forward, backward = of(timeline, "push", m, layer)[0], of(timeline, "push", m, layer)[-1]
        following = of(timeline, "push", m, layer + 1)[0]
        assert following.start < of(timeline, "dispatch", m, layer + 1)[0].start
        assert following.start > of(timeline, "combine", m, layer)[0].start
        assert forward.start < backward.start < of(timeline, "combine", m, layer + 1)[-1].start


def test_two_groups_with_checkpoints_in_flight_equal_dense(tmp_path):
    schedule = ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4)
    case = step(2, lengths=range(5, 13), schedule=schedule, replicas=[(1, 0, 0, 0.5), (1, 1, 3, 0.5), (0, 0, 6, 0.5)])
    case = replace(case, num_ranks=4, checkpointing=True, in_flight=True)
    cases = {"fast": case, "no checkpoints": replace(case, checkpointing=False)}
    for name, results_R in on_ranks(4, cases, tmp_path, watched_step).items():
        assert_equals_dense(cases[name], results_R)
        for result in results_R:
            assert_slots_are_right(result)


def test_waiting_for_a_slow_rank_is_no_exposed_transfer(tmp_path):
    found = on_ranks(2, {"slow": step(replicas=[(1, 0, 0, 0.5), (0, 0, 6, 0.5)])}, tmp_path, step_with_a_slow_rank)
    timeline = found["slow"][0]["timeline"]
    assert sum(event.seconds for event in timeline.events if event.layer == 1 and event.stage == "dispatch") > 1.5
    assert timeline.exposed_seconds()[0] < 1
