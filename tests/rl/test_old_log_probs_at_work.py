"""Runs that compute old log-probs in the update train what runs with whole recompute passes train."""

import pytest

from relibra.rl.config.defaults import PRESETS
from tests.rl.ranks_at_work import assert_near, assert_trained, outcome_of, run_alone, run_on_ranks

PLAIN = ("warmup.steps=0", "update.max_grad_norm=0.05")
TPPO = ("rollout.window=4", "algorithm.tail_drop=1", "run.steps=4")


def run_cases(name, make, folder):
    """Make a run with each setting, and compare the policies; return the rows."""
    case = (f"algorithm.preset={name}", *PLAIN, *(TPPO if name == "tppo" else ()))
    cases = {how: (*case, f"algorithm.old_log_probs={how}") for how in ("skip_first", "recompute")}
    ours, theirs = make(cases, folder)
    assert_trained(theirs)
    assert_near(ours, theirs, 1e-6)
    for row, other in zip(ours.rows, theirs.rows, strict=True):
        assert row["reward"] == other["reward"]
    return ours.rows


def alone_runs(cases, folder):
    return [outcome_of(folder / how, [run_alone(case, folder / how, descent=True)]) for how, case in cases.items()]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "gspo" else pytest.mark.slow) for one in PRESETS]
)
def test_a_run_trains_what_one_with_whole_passes_trains(name, tmp_path):
    rows = run_cases(name, alone_runs, tmp_path)
    assert any(row["k3_kl"] is not None for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "tppo"])
def test_two_ranks_that_follow_plans_train_the_same(name, tmp_path):
    rows = run_cases(name, lambda cases, folder: run_on_ranks(2, cases, folder, descent=True).values(), tmp_path)
    assert all(row["ran_at_home"] in (0, None) for row in rows)


def test_one_optimizer_step_needs_no_pass(tmp_path):
    [row] = run_alone(("run.steps=1", "update.mini_batches=1", "algorithm.group_filter=off"), tmp_path / "run")
    assert "recompute" not in row["seconds"]
    assert row["clip_fraction"] is None
    assert abs(row["k3_kl"]) < 1e-8
    assert row["router_disagreement"] == 0
    assert row["entropy"] > 0
