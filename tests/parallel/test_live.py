"""Live balancing on several processes equals the dense model, balances, and refuses what it cannot do."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from relibra.errors import PlanError
from relibra.parallel import live
from relibra.planning.budget import MOST_SLOTS, Budget
from relibra.rl.config.settings import PlanSettings
from tests.parallel.against_dense import assert_equals_dense, assert_same_training, relative_error
from tests.parallel.lives import (
    live_step,
    live_step_without_replay,
    live_training,
    long_live_step,
    refuse_all_live,
)
from tests.parallel.ranks_at_work import Case, dense_step, on_ranks
from tests.parallel.steps import of_experts, step
from tests.parallel.trainings import moved, plans_of, train_dense


def assert_balanced(results_R):
    """The ranks agree on what was reached: replicas made the busiest rank less busy."""
    assert len({(result["skew"], result["copies"]) for result in results_R}) == 1
    before, after = results_R[0]["skew"]
    assert results_R[0]["copies"] > 0
    assert 1 <= after < before
    computed_RX = np.array([result["computed"] for result in results_R])  # by pass and layer
    assert after == pytest.approx(computed_RX.max(axis=0).sum() / computed_RX.mean(axis=0).sum())
    assert {"wait counts", "wait solve"} < {*results_R[0]["stages"]}
    assert {"push", "return"} < {stage for result in results_R for stage in result["stages"]}


def test_a_live_step_equals_the_dense_model(tmp_path):
    cases = {"two micro-batches": step(), "canonical, checkpointed": step(sums="canonical", checkpointing=True)}
    for name, results_R in on_ranks(2, cases, tmp_path, live_step).items():
        assert_equals_dense(cases[name], results_R)
        assert_balanced(results_R)


@pytest.mark.slow
def test_a_long_training_keeps_the_latest_events(tmp_path):
    for result in on_ranks(2, {"long": step()}, tmp_path, long_live_step)["long"]:
        events = result["timeline"].events
        assert len(events) == 10
        assert {event.micro_batch for event in events} == {2}
        assert result["copies"] == 6, "of all passes"


@pytest.mark.slow
def test_live_steps_equal_the_dense_model(tmp_path):
    hot = of_experts([np.tile([5, 4], (n, 3, 1)) for n in (9, 12)])
    cases = {
        "checkpointed": step(checkpointing=True),
        "two in flight": step(in_flight=True),
        "two in flight, checkpointed": step(in_flight=True, checkpointing=True),
        "last tokens without routes": step(unrouted_last=True, slots=2),
        "a rank without samples": step(schedule=([0, 0, 1, 1], [0, 0, 0, 1])),
        "two experts of a rank with all tokens": step(trace=hot, schedule=([0, 0], [0, 1]), slots=2),
        "mixtral": step(family="mixtral", slots=2),
        "gpt-oss": step(family="gpt_oss"),
        "deepseek-v3, first layer dense": step(family="deepseek_v3", layer_ids=(1, 2), top_k=3),
        "no slots": step(slots=0),
        "a rank without samples, canonical": step(schedule=([0, 0, 1, 1], [0, 0, 0, 1]), sums="canonical"),
    }
    for name, results_R in on_ranks(2, cases, tmp_path, live_step).items():
        assert_equals_dense(cases[name], results_R)
        if name == "no slots":
            assert results_R[0]["copies"] == 0
        else:
            assert_balanced(results_R)


@pytest.mark.slow
def test_live_steps_follow_the_routes_of_the_model_itself(tmp_path):
    case = step(lengths=(40, 33, 37, 42), slots=2)
    results_R = on_ranks(2, {"native": case}, tmp_path, live_step_without_replay)["native"]
    with mock.patch.object(Case, "routes", return_value=None):
        assert_equals_dense(case, results_R)
    assert results_R[0]["copies"] > 0


@pytest.mark.slow
def test_live_steps_on_four_ranks_equal_the_dense_model(tmp_path):
    schedule = ([0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    groups = step(2, lengths=range(5, 13), schedule=([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4))
    cases = {
        "four": step(4, lengths=range(5, 13), schedule=schedule, slots=2, checkpointing=True),
        "four, canonical": step(4, lengths=range(5, 13), schedule=schedule, sums="canonical"),
        "two ranks without samples": step(4, schedule=([0, 0, 1, 1], [0, 2, 3, 1])),
        "two groups of two": replace(groups, num_ranks=4),
    }
    for name, results_R in on_ranks(4, cases, tmp_path, live_step).items():
        assert_equals_dense(cases[name], results_R)
        assert results_R[0]["copies"] > 0


@pytest.mark.slow
def test_three_live_steps_of_adamw_give_the_dense_weights(tmp_path):
    case = step(slots=2)
    cases = {"contiguous": case, "moved": moved(case, 1), "moved, canonical": replace(moved(case, 2), sums="canonical")}
    cases = {name: replace(one, num_steps=3, plans=plans_of(one)) for name, one in cases.items()}
    for name, results_R in on_ranks(2, cases, tmp_path, live_training).items():
        assert_same_training(train_dense(cases[name]), results_R, name)


def test_what_cannot_be_balanced_live_is_refused(tmp_path):
    for said in on_ranks(2, {"refusals": step()}, tmp_path, refuse_all_live)["refusals"]:
        assert "slots is -1" in said["slots"]
        assert "the model has experts of different shapes" in said["different shapes"]
        assert said["different shapes without slots"] == "no error"
        assert "slots is 1.5" in said["half a slot"]
        assert "tolerance is nan" in said["tolerance"]
        assert "sums is 'canon'" in said["sums"]
        assert "ranks_per_node is 3" in said["ranks per node"]
        assert "ranks differ in settings of balance_live" in said["settings"]
        assert "dispatch is 'rails'" in said["dispatch"]
        assert "ranks differ in settings of balance_live" in said["two dispatches"]
        assert "ranks differ in homes" in said["homes"]
        assert "executes a plan or balances live already" in said["inside a plan"]
        assert "balances live" in said["a plan inside"]
        assert "ranks differ in" in said["modes"]
        assert "enters balance_live: ranks [1]" in said["another point"]
        assert said["afterwards"] == "no error"


@pytest.mark.slow
def test_wrapped_models_have_the_gradients_of_a_live_step(tmp_path):
    case = step(unrouted_last=True)
    cases = {
        "torch.compile": replace(case, wrap="compiled"),
        "reentrant checkpoints": replace(case, wrap="reentrant"),
        "gradients accumulated": replace(case, accumulate=True),
        "adapters on attention": replace(case, wrap="adapted attention"),
        "autocast": replace(case, autocast=True),
    }
    results = on_ranks(2, cases, tmp_path, live_step)
    narrow = results.pop("autocast")  # what is rounded to bfloat16 may round the other way
    assert relative_error(narrow, dense_step(cases["autocast"])["gradients"]) < 0.01
    for name, results_R in results.items():
        assert_equals_dense(cases[name], results_R)


def test_live_balancing_takes_as_many_slots_as_plans_and_runs():
    assert live.MOST_SLOTS == MOST_SLOTS == Budget(slots=MOST_SLOTS).slots == PlanSettings(slots=MOST_SLOTS).slots
    with pytest.raises(PlanError, match=r"slots is 65: .* less than or equal to 64"):
        Budget(slots=MOST_SLOTS + 1)
    with pytest.raises(ValueError, match="64"):
        PlanSettings(slots=MOST_SLOTS + 1)
