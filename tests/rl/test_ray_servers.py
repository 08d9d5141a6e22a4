"""Runs on Ray that start their rollout servers: where they are, what they give, and how they end."""

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from relibra.reporting.data.metrics import read_metrics
from tests.rl.ray_at_work import ROOT, RayNodes, nodes_of
from tests.rl.runs import PATIENCE_S, LongRun, make_user_task, train, wait_until_gone

pytest.importorskip("ray", reason="runs on Ray need ray: pip install -e '.[ray]'")
pytest.importorskip("fastapi", reason="relibra serve needs fastapi: pip install -e '.[serve]'")
pytestmark = pytest.mark.slow

SERVE = ("parallel.launcher=ray", "rollout.engine=serve", "algorithm.preset=grpo")
REWARDS = """
import os, signal
from pathlib import Path

calls = []

def by_letters(response, row):
    return sum(map(ord, response)) % 3 / 2

def kill_server(response, row):
    calls.append(response)
    if os.environ["RANK"] == "1" and len(calls) > 8 and not Path("done").exists():
        Path("done").write_text("")
        for entry in Path("/proc").glob("[0-9]*"):
            words = (entry / "cmdline").read_bytes().split(b"\\0") if entry.exists() else []
            if b"serve" in words and str(Path("model").absolute()).encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)
    return by_letters(response, row)

def kill_one_vllm(response, row):
    calls.append(response)
    if os.environ["RANK"] == "1" and len(calls) > 8 and not Path("done").exists():
        Path("done").write_text("")
        for entry in Path("/proc").glob("[0-9]*"):
            words = (entry / "cmdline").read_bytes().split(b"\\0") if entry.exists() else []
            if b"tests.rl.rollout.vllm_program" in words and str(Path("model").absolute()).encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)
                break
    return by_letters(response, row)
"""
TIMES = ("seconds", "plan_seconds")
ROUNDED = 1e-5
"""A server computes requests together as they arrive, so last bits of log-probs differ from run to run."""


@pytest.fixture(scope="module")
def raylets():
    """Three nodes with two CPUs each, and the address in the environment."""
    with RayNodes(2, 2, 2) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes


@pytest.fixture
def train_task(tmp_path):
    """Return a function that runs a tiny training on rewards of its own."""
    task = make_user_task(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return lambda *words: train(tmp_path, *task, *words, cwd=tmp_path)


def servers_of(stderr: str) -> list[tuple[str, str]]:
    """Return address and first letters of the node id, of each server of the last start of a run."""
    placed = [line for line in stderr.splitlines() if line.startswith("rollout server at ")]
    return re.findall(r"rollout server at (\S+) on node \S+ \((\w+)\)", placed[-1])


def processes_with(text: str) -> dict[int, str]:
    """Return the command lines of processes that name a text."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words and int(entry.name) != os.getpid():
            found[int(entry.name)] = words
    return found


def check_equal(*ended):
    """Check that runs are complete, and have the same samples, and metrics but for rounding."""
    assert all(done.returncode == 0 for done in ended), "".join(done.stderr for done in ended)
    runs = [Path(json.loads(done.stdout)["run"]) for done in ended]
    first, second = ((run / "samples.jsonl").read_text() for run in runs)
    assert first == second
    rows = [read_metrics(run / "metrics.jsonl").rows for run in runs]
    assert len(rows[0]) == len(rows[1]) > 1
    for found, expected in zip(*rows, strict=True):
        assert found.keys() == expected.keys()
        for name in found.keys() - set(TIMES):
            if isinstance(expected[name], float | dict):
                assert found[name] == pytest.approx(expected[name], rel=ROUNDED, abs=ROUNDED), name
            else:
                assert found[name] == expected[name], name
        assert found["canary"]["equal_routes"] == 1.0
        assert found["router_disagreement"] == 0.0


def check_stops(run: Path, longest: int):
    """Check that a response ends with the token that ends responses, which is not shown, or is cut."""
    for line in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
        ended = line["finish"] == "stop"
        assert line["tokens"] == len(line["response"]) + ended
        assert ended or line["tokens"] == longest


def test_a_server_on_another_node_gives_the_numbers_of_a_local_one(raylets, tmp_path):
    on_ray = train(tmp_path / "ray", *SERVE)
    check_equal(on_ray, train(tmp_path / "local", *SERVE, "parallel.launcher=local"))
    [(_, of_ranks)], [(url, of_server)] = nodes_of(on_ray.stderr), servers_of(on_ray.stderr)
    assert of_server != of_ranks
    assert {of_server, of_ranks} <= {one[:8] for one in raylets.node_ids}
    run = tmp_path / "ray" / "run"
    check_stops(run, 12)
    assert url not in (run / "config.json").read_text()
    assert len(list((run / "server" / "weights").iterdir())) == 1, "folders of earlier versions are gone"
    assert not processes_with(str(run)), "the server ended with the run"


def test_a_killed_server_is_replaced_with_the_run_which_ends_as_without(raylets, train_task):
    words = ("run.steps=4", "checkpoint.every=1")
    on_ray = train_task(*SERVE, *words, "task.reward=my_rewards:kill_server", "--supervise")
    assert on_ray.stderr.count("restarting from step-0000") == 1
    assert "was killed by SIGKILL" in on_ray.stderr
    check_equal(on_ray, train_task(*SERVE, *words, "parallel.launcher=local"))


def test_without_supervise_a_killed_server_ends_the_run_with_one_sentence(raylets, train_task, tmp_path):
    done = train_task(*SERVE, "run.steps=4", "checkpoint.every=1", "task.reward=my_rewards:kill_server")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    url = servers_of(done.stderr)[0][0]
    assert error.startswith(f"error: the run ended early: the rollout server at {url} on node ")
    assert f"relibra train --resume {tmp_path / 'run'}" in error


def test_the_node_of_a_server_is_replaced(tmp_path, monkeypatch):
    words = (*SERVE, "checkpoint.every=1", "--supervise")
    with RayNodes(2, 2, 2) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with LongRun(tmp_path, *words) as going:
            going.wait_for("(2/")
            [(url, lost)], of_server = servers_of(going.stderr), list(processes_with(f"{going.run}/server/start-0"))
            nodes.remove(next(one for one in nodes.node_ids if one.startswith(lost)))
            going.wait_for("restarting from step-0000")
            going.wait_for("resuming from the checkpoint after")
            deadline = time.monotonic() + PATIENCE_S
            while "step " not in going.stderr.partition("resuming from the checkpoint after")[2]:
                assert time.monotonic() < deadline, going.stderr
                time.sleep(0.1)
            assert f"({lost}) of Ray, with the rollout server at {url}, was lost" in going.stderr
            assert servers_of(going.stderr)[0][1] != lost
            wait_until_gone(of_server, 60)
            going.process.send_signal(signal.SIGINT)
            assert going.exit_code() == 130


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_server_outlives_the_driver_and_nobody_reads_its_key(raylets, number, tmp_path):
    with LongRun(tmp_path, *SERVE) as going:
        going.wait_for("(1/")
        of_server = processes_with(f"{going.run}/server/start-0")
        assert len(of_server) == 1
        environment = Path(f"/proc/{next(iter(of_server))}/environ").read_bytes().split(b"\0")
        [key] = [one.partition(b"=")[2] for one in environment if one.startswith(b"RELIBRA_SERVER_KEY=")]
        assert len(key) > 20
        assert not processes_with(key.decode())
        going.process.send_signal(number)
        assert going.exit_code(60) == (130 if number == signal.SIGINT else -number)
        wait_until_gone(list(of_server), 60)
    written = [file for folder in (tmp_path, raylets.folder) for file in folder.rglob("*") if file.is_file()]
    assert any("gcs_server" in file.name for file in written)
    assert not [file for file in written if key in file.read_bytes()]


def test_without_room_for_the_server_the_run_says_what_it_lacks(raylets, tmp_path):
    done = train(tmp_path, *SERVE, "rollout.server_options=--experts 3")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: 1 rollout server with 4 CPU needs room on a node")
    assert "Ray's nodes have 2 CPU, 2 CPU, 2 CPU, 0 CPU in all: add nodes" in last
    assert not (tmp_path / "run").exists()


def test_a_server_that_does_not_start_ends_the_run_with_its_words(raylets, tmp_path):
    done = train(tmp_path, *SERVE, "rollout.server_options=--experts 1 --attention 1 --spare-experts 63")
    assert done.returncode == 1
    assert "did not start: the rollout server ended" in done.stderr
    assert "--spare-experts 63" in done.stderr


@pytest.fixture
def vllm(tmp_path):
    """Return settings for stand-ins of vLLM, whose interpreter is a program that knows their module."""
    python = tmp_path / "python"
    words = shlex.join([sys.executable, "-m", "tests.rl.rollout.vllm_program"])
    path = shlex.quote(f"{ROOT}:{ROOT / 'src'}")
    python.write_text(f'#!/bin/sh\nshift 2\nexport PYTHONPATH={path}\ncd {ROOT}\nexec {words} "$@"\n')
    python.chmod(0o755)
    return ("parallel.launcher=ray", "rollout.engine=vllm", f"rollout.server_python={python}", "rollout.max_prompt=64")


def engines_of(run: Path) -> list[tuple[int, str]]:
    """Return process ids of the engines of the stand-ins, and the GPUs of each."""
    logs = [file.read_text() for file in sorted((run / "server").glob("log-*"))]
    return [(int(pid), gpus) for log in logs for pid, gpus in re.findall(r"engine (\d+), GPUs (\S+)", log)[-1:]]


def test_a_run_goes_on_with_the_vllm_server_that_is_left(tmp_path, vllm, train_task, monkeypatch):
    two = ("rollout.servers=2", "rollout.server_options=--tensor-parallel-size 2", "algorithm.preset=grpo")
    with RayNodes(2, 2, 2, gpus=2) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        done = train_task(*vllm, *two, "run.steps=4", "task.reward=my_rewards:kill_one_vllm")
    assert done.returncode == 0, done.stderr
    run, placed = tmp_path / "run", [node for _, node in nodes_of(done.stderr) + servers_of(done.stderr)]
    assert set(placed) == {one[:8] for one in nodes.node_ids}, "ranks on one node, each server on another"
    rows = read_metrics(run / "metrics.jsonl").rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["canary"]["servers"] for row in rows][::3] == [2, 1]
    for row in rows:
        assert row["canary"]["difference"] < 1e-5
        assert row["router_disagreement"] == 0.0
    assert done.stderr.count("ended with exit code 137") == 1
    assert "the run goes on with 1 other rollout server\n" in done.stderr
    check_stops(run, 12)
    engines = engines_of(run)
    assert [gpus for _, gpus in engines] == ["0,1", "0,1"]
    wait_until_gone([pid for pid, _ in engines], 10)
    assert not processes_with(str(run))


def test_no_vllm_server_outlives_the_driver(raylets, tmp_path, vllm):
    with LongRun(tmp_path, *vllm, "algorithm.preset=grpo") as going:
        going.wait_for("(1/")
        [(engine, _)] = engines_of(going.run)
        servers = processes_with(f"{going.run}/server/start-0")
        assert len(servers) == 3, "the guard, which is two processes, and the server"
        going.process.kill()
        going.exit_code(60)
        wait_until_gone([engine, *servers], 60)
