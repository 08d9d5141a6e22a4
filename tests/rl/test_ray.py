"""A run on Ray: raylets on this machine, with the endings of a run on local processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relibra.reporting.data.metrics import read_metrics
from tests.rl.ray_at_work import RayNodes, nodes_of
from tests.rl.runs import LongRun, check_whole, make_user_task, train, wait_until_gone

pytest.importorskip("ray", reason="runs on Ray need ray: pip install -e '.[ray]'")
pytestmark = pytest.mark.slow

ON_RAY = "parallel.launcher=ray"
REWARDS = """
import os, signal
from pathlib import Path

from relibra.errors import EngineError
from relibra.rl import step

calls = []

def _once(number, what):
    calls.append(number)
    if os.environ["RANK"] == "1" and len(calls) > number and not Path("done").exists():
        Path("done").write_text(str(os.getpid()))
        what()

def by_letters(response, row):
    return sum(map(ord, response)) % 3 / 2

def kill_rank(response, row):
    _once(8, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return by_letters(response, row)

def kill_actor(response, row):
    _once(8, lambda: os.kill(os.getppid(), signal.SIGKILL))
    return by_letters(response, row)

def fail(response, row):
    def failing(*_):
        raise EngineError("rank 1 has no idea")

    if os.environ["RANK"] == "1":
        step.check_versions = failing
    return 0.5
"""


@pytest.fixture(scope="module")
def raylets():
    """Two nodes with two CPUs each, and the address in the environment."""
    with RayNodes(2, 2) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes


@pytest.fixture
def train_task(tmp_path):
    """Return a function that runs a tiny training on rewards of its own."""
    task = make_user_task(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return lambda *words: train(tmp_path, *task, *words, cwd=tmp_path)


def rows(run):
    """Return the metrics of a run without its times."""
    timed = ("seconds", "plan_seconds")
    return [{key: value for key, value in row.items() if key not in timed} for row in read_metrics(run).rows]


def check_equal(on_ray, local):
    assert on_ray.returncode == local.returncode == 0, on_ray.stderr + local.stderr
    ended = [json.loads(done.stdout) for done in (on_ray, local)]
    assert ended[0]["complete"]
    found, expected = (rows(Path(one["run"], "metrics.jsonl")) for one in ended)
    assert found == expected
    assert found


def test_ranks_of_one_node_give_the_numbers_of_local_processes(raylets, tmp_path):
    on_ray = train(tmp_path / "ray", ON_RAY)
    check_equal(on_ray, train(tmp_path / "local"))
    [(ranks, node)] = nodes_of(on_ray.stderr)
    assert ranks == "ranks 0 to 1"
    assert any(one.startswith(node) for one in raylets.node_ids)
    assert "step 1 (2/2)" in on_ray.stderr


def test_ranks_of_two_nodes_give_the_numbers_of_local_processes(raylets, tmp_path):
    words = ("parallel.ranks=4", "plan.balancer=static")
    on_ray = train(tmp_path / "ray", *words, ON_RAY)
    check_equal(on_ray, train(tmp_path / "local", *words))
    placed = nodes_of(on_ray.stderr)
    assert [ranks for ranks, _ in placed] == ["ranks 0 to 1", "ranks 2 to 3"]
    assert {node for _, node in placed} == {one[:8] for one in raylets.node_ids}


@pytest.mark.parametrize("what", ["kill_rank", "kill_actor"])
def test_a_killed_worker_is_replaced_and_the_run_ends_as_without(raylets, what, train_task):
    words = ("run.steps=5", "checkpoint.every=1", "algorithm.preset=grpo")
    on_ray = train_task(*words, ON_RAY, f"task.reward=my_rewards:{what}", "--supervise")
    check_equal(on_ray, train_task(*words))
    assert on_ray.stderr.count("restarting from step-0000") == 1
    cause = (
        "rank 1 was killed by SIGKILL" if what == "kill_rank" else "the process of Ray that has ranks 0 to 1 on node"
    )
    assert cause in on_ray.stderr


def test_the_error_of_the_rank_that_failed_is_told(raylets, train_task):
    done = train_task(ON_RAY, "task.reward=my_rewards:fail", "--supervise")
    assert done.returncode == 1
    assert "rank 1: rank 1 has no idea" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the run ended early: rank 1 failed (see above)")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_the_step_finish_and_leaves_a_checkpoint(raylets, number, tmp_path):
    with LongRun(tmp_path, ON_RAY) as going:
        going.wait_for("(1/")
        going.process.send_signal(number)
        assert going.exit_code() == 130
    outcome = json.loads(going.stdout)
    assert outcome["complete"] is False
    assert outcome["steps"] == check_whole(going.run) >= 1
    assert (going.run / "checkpoints" / f"step-{outcome['steps']:05d}").is_dir()
    assert going.stderr.count("stopping after this step") == 1
    assert f"relibra train --resume {going.run}" in going.stderr


def rank_processes(folder):
    """Return the processes of ranks that run in a folder."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and os.readlink(f"/proc/{entry.name}/cwd") == str(folder):
                words = Path(entry.path, "cmdline").read_bytes()
                found += [int(entry.name)] * (b"relibra.rl.run.rank" in words)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_driver(raylets, number, tmp_path):
    with LongRun(tmp_path, ON_RAY) as going:
        going.wait_for("(1/")
        ranks = rank_processes(tmp_path)
        assert len(ranks) == 2
        if number == signal.SIGINT:
            os.kill(ranks[0], signal.SIGSTOP)  # so that the step cannot finish
        going.process.send_signal(number)
        if number == signal.SIGINT:
            going.wait_for("press Ctrl-C again")
            going.process.send_signal(number)
        assert going.exit_code(60) == (130 if number == signal.SIGINT else -number)
        wait_until_gone(ranks, 60)


def test_lost_node_is_replaced_or_the_run_says_what_it_lacks(tmp_path, monkeypatch):
    words = (ON_RAY, "parallel.ranks=4", "checkpoint.every=1", "algorithm.preset=grpo", "--supervise")
    with RayNodes(2, 2, 2) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with LongRun(tmp_path, *words) as going:
            going.wait_for("(2/")
            for restarts in (1, 2):
                lost = nodes_of(going.stderr)[1][1]
                nodes.remove(next(one for one in nodes.node_ids if one.startswith(lost)))
                if restarts == 1:
                    going.wait_for("restarting from step-0000")
                    going.wait_for("resuming from the checkpoint after")
                    said = len(going.stderr)
                    deadline = time.monotonic() + 120
                    while "step " not in going.stderr[said:]:
                        assert time.monotonic() < deadline
                        time.sleep(0.1)
                    assert lost not in nodes_of(going.stderr)[1][1]
                    assert f"({lost}) of Ray, with ranks 2 to 3, was lost" in going.stderr
            assert going.exit_code(240) == 1
    last = going.stderr.splitlines()[-1]
    assert last.startswith("error: 4 ranks, each with 1 CPU, need nodes with the same")
    assert "room for 2, 0:" in last
    assert f"relibra train --resume {going.run}" in last


def test_torchrun_and_ray_exclude_one_another(tmp_path):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    done = train(tmp_path, ON_RAY, "parallel.ranks=1", command=(*launcher, "-m", "relibra"))
    assert "parallel.launcher=ray starts the ranks itself" in done.stderr
    assert isinstance(done, subprocess.CompletedProcess)
