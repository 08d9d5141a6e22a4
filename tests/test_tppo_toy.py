"""Truncated PPO learns the toy as PPO does, in less decoding; medians of six seeds (docs/papers.md: T-PPO)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [5, 8, 96])
def test_a_response_goes_on_where_it_stopped(window):
    from benchmarks.rl import tppo_toy as toy

    policy_SA = np.tile(np.array([1.0, 0.0, 0.0, 0.0]), (45, 1))  # +1 until nothing is left, then the end
    policy_SA[: 1 - toy.LOWEST] = (0, 0, 0, 1)
    for seed in range(9):
        rng = np.random.default_rng(seed)
        slots, finished = toy.new_slots(1), False
        toy.fill(slots, np.ones(1, dtype=bool), "D1", rng)
        target = int(slots.target_B[0])
        steps = 0
        while not finished:
            steps += 1
            found = toy.decode(slots, policy_SA, window, rng)
            finished = bool(found.finished_B[0])
            assert finished or (found.added_B[0] == window and found.reward_B[0] == 0)
        assert steps == -(-(target + 1) // window)
        assert slots.length_B[0] == target + 1
        assert found.reward_B[0] == 1
        assert (slots.states_BC[0, : target + 1] + toy.LOWEST).tolist() == list(range(target, -1, -1))


@pytest.mark.slow
def test_windows_reach_the_same_reward_in_less_decoding():
    from benchmarks.rl.tppo_toy import SEEDS, SETTINGS, measured

    sync, windowed = measured(SETTINGS[:2], SEEDS)
    assert (sync["setting"], windowed["setting"]) == ("sync PPO", "W = 32, lambda 0.95, hold")
    assert sync["solved"] == windowed["solved"] == SEEDS
    assert windowed["updates / sync"] <= 1.2
    assert windowed["decode_steps / sync"] <= 0.45
    assert sync["idle"] >= 0.5
    assert windowed["idle"] <= 0.35
    assert windowed["continued"] > 0


@pytest.mark.slow
def test_the_value_after_the_cut_decides_where_targets_are_far():
    from benchmarks.rl.tppo_toy import SEEDS, Setting, measured

    hold, zero = measured([Setting("D2", 8, 1.0, "hold"), Setting("D2", 8, 1.0, "zero")], SEEDS)
    assert hold["updates"] <= 150
    assert hold["solved"] == SEEDS
    assert zero["updates"] >= 2.5 * hold["updates"] or zero["solved"] <= SEEDS / 2


@pytest.mark.slow
def test_the_program_prints_its_rows_and_writes_none_when_quick(tmp_path):
    command = [sys.executable, "-W", "error", str(BENCHMARKS), "tppo_toy", "--quick", "--json"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["case"] for row in json.loads(done.stdout)] == ["D1, sync PPO", "D1, W = 32, lambda 0.95, hold"]
    assert not list(tmp_path.iterdir())
