"""T-PPO on a tiny transformer: the same reward as PPO in less decoding, and what the gate of the value model does."""

from __future__ import annotations

import pytest

SEEDS = (0, 1, 2)
SETTINGS = (
    "parallel.ranks=1",
    "task.max_terms=12",
    "task.continue_probability=0.8",
    "model.num_layers=2",
    "model.num_experts=8",
    "warmup.batch=64",
    "warmup.error_rate=0.2",
    "warmup.learning_rate=8e-3",
    "algorithm.preset=tppo",
    "algorithm.tail_drop=2",
    "rollout.prompts_per_step=64",
    "rollout.responses_per_prompt=1",
    "rollout.max_response=80",
    "update.mini_batches=2",
    "update.micro_batch_tokens=1024",
    "update.learning_rate=2e-4",
    "update.lr_warmup_steps=10",
    "evaluation.prompts=128",
    "critic.min_finished=1",
    "critic.explained_variance_gate=off",
)
WINDOW = "rollout.window=20"
LAST = 3
"""Evaluations that a reward is the mean of."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs():
    """Whole runs, as the benchmark makes them."""
    from benchmarks.rl import runs as rl_runs

    return rl_runs


@pytest.fixture(scope="module")
def policy(runs, tmp_path_factory):
    """Return a warm model that knows addition and makes random errors; seeds differ in prompts and samples."""
    return runs.warmed_up((*SETTINGS, "warmup.steps=240"), tmp_path_factory.mktemp("learning"), "warm-up")


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_gain_half_of_what_ppo_gains_in_less_decoding(runs, policy, tmp_path, seed):
    own = (*SETTINGS, f"run.seed={seed}", "evaluation.every=3")
    whole = (*own, "rollout.window=0")
    waiting = runs.trained((*whole, "run.steps=30", "critic.pretrain_steps=10"), policy, tmp_path, "ppo")
    # As many finished responses until the policy moves, which takes more steps where some of them go on.
    windowed = runs.trained((*own, WINDOW, "run.steps=54", "critic.pretrain_steps=18"), policy, tmp_path, "tppo")

    curve = runs.points(waiting)
    first, final = curve[0].reward, runs.smoothed([point.reward for point in curve], LAST)[-1]
    target = (first + final) / 2
    ppo, tppo = (runs.first_at(runs.points(rows), target, LAST) for rows in (waiting, windowed))
    assert final > first + 0.06, "PPO learns, so there is something to reach"
    assert tppo is not None, f"T-PPO never came to {target:.3f}"
    assert tppo.decode_steps <= 0.75 * ppo.decode_steps
    assert runs.idle_share(windowed) < 0.6 * runs.idle_share(waiting)
    assert all(row["unfinished_share"] == 0 for row in waiting)
    assert sum(row["unfinished_share"] for row in windowed) > 0.2 * len(windowed)


def test_gate_keeps_unfinished_out_for_an_ignorant_value_model(runs, policy, tmp_path):
    own = (*SETTINGS, WINDOW, "run.steps=12", "evaluation.every=4", "critic.pretrain_steps=2")
    ignorant = (*own, "critic.learning_rate=1e-12")
    finished_only = runs.trained((*ignorant, "critic.explained_variance_gate=1.0"), policy, tmp_path, "finished-only")
    gated = runs.trained((*ignorant, "critic.explained_variance_gate=0.05"), policy, tmp_path, "gated")
    open_gate = runs.trained((*own, "critic.explained_variance_gate=-1e9", "run.steps=4"), policy, tmp_path, "open")

    assert all(abs(row["explained_variance"] or 0.0) < 0.05 for row in gated)
    assert [row["trained_tokens"] for row in gated] == [row["trained_tokens"] for row in finished_only]
    for row, other in zip(runs.points(gated), runs.points(finished_only), strict=True):
        assert abs(row.reward - other.reward) <= 0.02
    assert all(0 < row["trained_tokens"] < row["sampled_tokens"] for row in gated[2:])
    of_open, of_gated = (sum(row["trained_tokens"] for row in rows[2:4]) for rows in (open_gate, gated))
    assert of_open > 1.2 * of_gated, "with the gate open, unfinished responses train too"
