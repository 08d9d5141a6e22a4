"""Arithmetic of `relibra bench trl`: rows from pairs of runs, CPU seconds and memory of a process tree."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.harness.process_tree import process_tree, tree_bytes, tree_cpu_seconds
from benchmarks.rl.trl import CELLS, Job, result_row, settings
from benchmarks.rl.trl_job import ANSWER, ANSWERS, PROMPTS, rewards
from relibra.rl.config.run_config import load_config

MIB = 1 << 20


def test_a_row_compares_medians_of_both_sides():
    trl = [Job(seconds=seconds, bytes=100 * MIB) for seconds in (2.0, 1.0, 4.0)]
    own = [Job(seconds=seconds, bytes=120 * MIB, stages={"update": seconds / 2}) for seconds in (1.5, 1.0, 1.6)]
    row = result_row(CELLS[-1], list(zip(trl, own, strict=True)))
    assert (row["seconds"], row["trl_seconds"], row["ratio"]) == (1.5, 2.0, 0.75)
    assert (row["ratio low"], row["ratio high"]) == pytest.approx((0.575, 0.875))
    assert (row["mib"], row["memory_ratio"], row["ok"], row["stages"]) == (120, 1.2, False, {"update": 0.75})
    smaller = [replace(job, bytes=105 * MIB) for job in own]
    assert result_row(CELLS[-1], list(zip(trl, smaller, strict=True)))["ok"]


def test_both_sides_sample_and_train_as_much(tmp_path):
    (tmp_path / "prompts.jsonl").touch()
    for cell in CELLS:
        config = load_config(None, settings(tmp_path, cell))
        assert (config.parallel.ranks, config.model.dtype, config.update.mini_batches) == (
            cell.ranks,
            cell.dtype,
            cell.mini_batches,
        )
        assert config.rollout.responses_per_step == PROMPTS * ANSWERS
        assert config.update.activations == "recompute"
        assert config.algorithm.kl_coefficient == 0


def test_rewards_are_the_share_of_even_words():
    text = " ".join(f"w{number % 3}" for number in range(ANSWER))
    assert rewards([text], [[2] * ANSWER]) == [pytest.approx(2 / 3)]


def test_a_tree_counts_what_its_processes_have_started():
    spends = "import time; a = b'x' * (1 << 26)\nwhile time.process_time() < 0.3: pass\nprint(1); input()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {spends!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin, "a pipe"
        assert process.stdout, "a pipe"
        process.stdout.readline()
        assert len(process_tree(process.pid)) == 2
        assert tree_cpu_seconds(process.pid) >= 0.29
        assert tree_bytes(process.pid) > 64 * MIB
        process.stdin.write("\n")
        process.stdin.close()
    assert process_tree(os.getpid())[0] == os.getpid()
