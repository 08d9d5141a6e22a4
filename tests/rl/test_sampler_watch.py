"""The check of the sampler in whole runs: what it stops and falls back from, and that resumed runs check alike."""

import json
from dataclasses import replace

import pytest

from relibra.errors import EngineError
from relibra.rl import step
from relibra.rl.rollout.collect import collect
from tests.rl.ranks_at_work import assert_near, assert_trained, comparable, outcome_of, run_alone, run_on_ranks

RUN = ("algorithm.preset=grpo", "warmup.steps=0", "update.max_grad_norm=0.05", "rollout.max_response=24")
SAMPLER = (*RUN, "algorithm.old_log_probs=sampler")


pytestmark = pytest.mark.usefixtures("_leave_group")


@pytest.fixture
def broken_sampler(monkeypatch):
    """Let the sampler report wrong log-probs in the second step."""

    def wrong(*args, weight_version, **options):
        rollout = collect(*args, weight_version=weight_version, **options)
        if weight_version != 1:
            return rollout
        return replace(
            rollout, responses=[replace(one, log_probs_r=one.log_probs_r - 0.3) for one in rollout.responses]
        )

    monkeypatch.setattr(step, "collect", wrong)


def made(settings, folder):
    return outcome_of(folder, [run_alone(settings, folder, descent=True)])


def test_an_accepted_sampler_needs_no_pass(tmp_path):
    ours, theirs = made(SAMPLER, tmp_path / "ours"), made(RUN, tmp_path / "theirs")
    assert_trained(ours)
    assert_near(ours, theirs, 1e-5)
    for row in ours.rows:
        assert "recompute" not in row["seconds"]
        assert row["sampler_check"]["accepted"]
        assert row["alarms"] == []


def test_a_broken_sampler_falls_back(broken_sampler, tmp_path):
    ours, theirs = made(SAMPLER, tmp_path / "ours"), made(RUN, tmp_path / "theirs")
    assert_near(ours, theirs, 1e-5)
    first, second = ours.rows
    assert first["sampler_check"]["accepted"]
    assert not second["sampler_check"]["accepted"]
    assert any("mean log-ratio" in where for where in second["sampler_check"]["differs"])
    assert any("trainer and sampler differ more" in alarm for alarm in second["alarms"])
    assert second["log_ratio_mean_abs"] == pytest.approx(0.3, abs=0.01)


def test_a_broken_sampler_stops_the_run_before_the_update(broken_sampler, tmp_path):
    with pytest.raises(EngineError, match="step 1: trainer and sampler differ more than in steps before"):
        run_alone((*RUN, "update.on_mismatch=stop"), tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_resumed_run_checks_against_the_same_steps(tmp_path):
    settings = (*RUN, "checkpoint.every=2")
    whole = run_alone((*settings, "run.steps=4"), tmp_path / "whole")
    run_alone((*settings, "run.steps=2"), tmp_path / "cut")
    second = run_alone((*settings, "run.steps=4"), tmp_path / "cut")
    assert comparable(second) == comparable(whole[2:])
    states = [
        json.loads((tmp_path / name / "checkpoints" / "step-00004" / "state.json").read_text())["state"]
        for name in ("whole", "cut")
    ]
    assert states[0]["sampler_history"] == states[1]["sampler_history"]
    assert len(states[0]["sampler_history"]["steps"]["recent_XZ3"]) == 4


@pytest.mark.slow
def test_two_ranks_decide_alike(tmp_path):
    found = run_on_ranks(2, {"ours": SAMPLER, "theirs": RUN}, tmp_path, descent=True)
    assert_near(found["ours"], found["theirs"], 1e-5)
    first, second = found["ours"].of_ranks
    assert [row["sampler_check"] for row in first] == [row["sampler_check"] for row in second]
