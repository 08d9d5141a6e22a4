"""Runs go on after a reward that raises or a gradient that is not finite, and end where there are too many of them."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from relibra.errors import ConfigError, EngineError
from relibra.rl.algorithms.loss import PolicyLoss
from relibra.rl.model import optimizer
from relibra.rl.tasks.task import RewardError
from tests.rl.ranks_at_work import ByLetters, run_alone

pytestmark = pytest.mark.usefixtures("_leave_group")


EVERY_REWARD = ("algorithm.group_filter=off", "warmup.steps=0", "evaluation.every=1", "run.steps=3")


def fail_rewards(monkeypatch, fails):
    """Let the reward raise at the calls, counted from 0, that `fails` chooses."""
    before, calls = ByLetters.reward, []

    def reward(self, prompt, response, *, stopped):
        calls.append(response)
        if fails(len(calls) - 1):
            raise RewardError("task.reward 'mine': raised ValueError: no idea")
        return before(self, prompt, response, stopped=stopped)

    monkeypatch.setattr(ByLetters, "reward", reward)


def spoil_losses(monkeypatch, spoils):
    """Let the loss be nan at the calls, counted from 0, that `spoils` chooses."""
    before, calls = PolicyLoss.__call__, []

    def call(*args):
        loss, sums = before(*args)
        if args[3].step_tokens == 9:  # of the made-up batch that a loss is tried with
            return loss, sums
        calls.append(1)
        return loss * math.nan if spoils(len(calls) - 1) else loss, sums

    monkeypatch.setattr(PolicyLoss, "__call__", call)


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_reward_that_sometimes_raises_leaves_out_its_response(preset, monkeypatch, tmp_path, caplog):
    fail_rewards(monkeypatch, lambda call: call == 64 + 2)  # behind those of the evaluation before the first step
    rows = run_alone((*EVERY_REWARD, f"algorithm.preset={preset}"), tmp_path)
    assert [row["baseline"] is None for row in rows] == [False, True, True]
    assert rows[0]["baseline"].keys() == rows[0]["evaluation"].keys()
    assert [row["failed_rewards"] for row in rows] == [1, 0, 0]
    assert [row["finished"] for row in rows] == [8, 8, 8]
    assert all(math.isfinite(row["reward"]) for row in rows)
    assert rows[0]["alarms"][0].startswith("failed_rewards is 1")
    assert "step 0: 1 of 8 rewards failed, these responses are left out; the first: task.reward 'mine'" in caplog.text
    trained = [json.loads(line)["sample"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert 2 not in trained


def test_failed_rewards_beyond_the_limit_end_the_run(monkeypatch, tmp_path):
    fail_rewards(monkeypatch, lambda call: call in (2, 3))
    with pytest.raises(ConfigError, match=r"step 0: 2 of 8 rewards failed, and 1 may; .* no idea"):
        run_alone((*EVERY_REWARD, "evaluation.every=0"), tmp_path)


def test_an_evaluation_leaves_out_failed_rewards_too(monkeypatch, tmp_path):
    fail_rewards(monkeypatch, lambda call: call == 10)
    rows = run_alone((*EVERY_REWARD, "run.steps=1", "evaluation.prompts=16"), tmp_path)
    assert math.isfinite(rows[0]["baseline"]["reward"])


def test_gradient_that_is_not_finite_is_counted_and_skipped(monkeypatch, tmp_path, caplog):
    spoil_losses(monkeypatch, lambda call: call == 1)
    rows = run_alone((*EVERY_REWARD, "algorithm.preset=ppo", "run.steps=2"), tmp_path)
    assert [row["skipped_updates"] for row in rows] == [1, 0]
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert any("skipped_updates is 1" in sentence for sentence in rows[0]["alarms"])
    assert "step 0: the gradient of the policy has the norm nan: optimizer step 1 is skipped" in caplog.text
    assert all(torch.isfinite(one).all() for one in load_file(tmp_path / "policy" / "model.safetensors").values())


def test_gradients_that_stay_bad_end_the_run_across_steps(monkeypatch, tmp_path):
    spoil_losses(monkeypatch, lambda call: call >= 2)
    monkeypatch.setattr(optimizer, "MOST_SKIPPED", 3)
    with pytest.raises(EngineError, match=r"step 2: the gradient of the policy has the norm nan, 4 times in a row"):
        run_alone((*EVERY_REWARD, "algorithm.preset=ppo", "run.steps=9"), tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
