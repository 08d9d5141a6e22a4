"""Whole runs with `update.shared_prompts`: they train what runs that repeat prompts train, in fewer tokens."""

import pytest

from tests.rl.ranks_at_work import assert_near, assert_trained, outcome_of, run_alone, run_on_ranks

COMMON = ("rollout.responses_per_prompt=4", "rollout.prompts_per_step=2", "update.micro_batch_tokens=200")
CASES = {
    "ppo": ("algorithm.preset=ppo", "run.steps=2"),
    "tppo": ("algorithm.preset=tppo", "rollout.window=4", "algorithm.tail_drop=1", "run.steps=3"),
    "grpo": ("algorithm.preset=grpo", "algorithm.kl_coefficient=0.1"),
    "dapo": (),
    "gspo": ("algorithm.preset=gspo", "update.activations=recompute"),
    "r2": ("algorithm.replay=R2",),
    "live": ("algorithm.replay=off", "plan.balancer=live", "update.activations=host"),
    "dense": ("algorithm.preset=ppo", "model.num_experts=0", "algorithm.replay=off"),
    "canonical": ("plan.sums=canonical", "plan.balancer=relibra_paper_tokens"),
    "two_nodes": ("plan.balancer=relibra", "update.micro_batch_tokens=60", "update.mini_batches=1"),
}
PAIRS = {
    f"{name}_{shared}": (*COMMON, *case, f"update.shared_prompts={shared}")
    for name, case in CASES.items()
    for shared in ("true", "false")
}


def assert_trains_the_same(found, name):
    shared, repeated = found[f"{name}_true"], found[f"{name}_false"]
    assert_trained(shared)
    assert_near(repeated, shared, 1e-5)
    for ours, theirs in zip(shared.rows, repeated.rows, strict=True):
        assert ours["fed_tokens"] < theirs["fed_tokens"] or not theirs["fed_tokens"]
        assert theirs["prompt_routes_differing"] is None
        assert ours["trained_tokens"] == theirs["trained_tokens"]
        for metric in ("loss", "value_loss", "entropy", "reference_kl"):
            assert ours[metric] == (None if theirs[metric] is None else pytest.approx(theirs[metric], abs=1e-5))
        assert not ours["ran_at_home"]
        assert ours["prompt_routes_differing"] in (0, None)


@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_on_one_rank_it_changes_rounding_only(name, tmp_path):
    cases = {case: PAIRS[case] for case in (f"{name}_true", f"{name}_false")}
    found = {
        case: outcome_of(tmp_path / case, [run_alone(settings, tmp_path / case, descent=True)])
        for case, settings in cases.items()
    }
    assert_trains_the_same(found, name)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run_on_ranks(2, PAIRS, tmp_path_factory.mktemp("together"), descent=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks_it_changes_rounding_only(name, together):
    assert_trains_the_same(together, name)
