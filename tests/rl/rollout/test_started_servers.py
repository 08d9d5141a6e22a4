"""Rollout servers that a run starts: their commands, their processes, and how ranks learn of them; without Ray."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from relibra.environment import SERVER_KEY, StartedServers, started_server_urls, tell_started_servers
from relibra.errors import ConfigError, EngineError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout.served.api_key import read_api_key
from relibra.rl.rollout.started.commands import resources_of_server, serve_command, vllm_command
from relibra.rl.rollout.started.own_server import own_server
from relibra.rl.rollout.started.server_process import ServerProcess
from relibra.rl.run.on_ray.layout import has_room
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from tests.rl.runs import alive, wait_until_gone

ON_RAY = "parallel.launcher=ray"


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, False, {"CPU": 2}),
        ({"server_options": "--attention=2 --experts 3"}, False, {"CPU": 5}),
        ({"server_options": "--experts 3 --threads 4"}, True, {"CPU": 16}),
        ({"server_options": "--attention 0 --experts no"}, False, {"CPU": 1}),
        ({"server_cpus": 8}, False, {"CPU": 8}),
        ({"engine": "vllm"}, False, {"CPU": 1}),
        ({"engine": "vllm"}, True, {"CPU": 1, "GPU": 1}),
        ({"engine": "vllm", "server_options": "-tp 4 --pipeline-parallel-size=2"}, True, {"CPU": 8, "GPU": 8}),
        ({"engine": "vllm", "server_options": "-tp 4", "server_cpus": 6}, False, {"CPU": 6}),
        ({"engine": "vllm", "server_gpus": 2}, False, {"CPU": 2, "GPU": 2}),
    ],
)
def test_a_server_reserves_what_its_options_ask_for(settings, gpus, expected):
    assert resources_of_server(RolloutSettings(**{"engine": "serve"} | settings), gpus=gpus) == expected
    assert has_room({name: float(amount) for name, amount in expected.items()}, expected)
    assert has_room({"CPU": 100.0}, expected) != ("GPU" in expected)


def test_options_of_the_user_come_last_and_no_command_holds_a_key():
    config = load_config(None, ["rollout.engine=serve", "rollout.server_options=--threads 3"])
    words = serve_command(config, "model", host="10.0.0.1", has_key=True, threads=2)
    assert words[-2:] == ["--threads", "3"]
    assert words[words.index("--api-key-from") + 1] == f"env:{SERVER_KEY}"
    assert "--api-key-from" not in serve_command(config, "model")
    config = load_config(None, ["rollout.engine=vllm", ON_RAY, "rollout.server_options=-tp 2", "model.dtype=bfloat16"])
    words = vllm_command(config, "model", host="10.0.0.1", port=7)
    assert words[-2:] == ["-tp", "2"]
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--enable-return-routed-experts" in words
    assert not [word for word in words if "key" in word]


def test_only_a_run_on_ray_starts_vllm_or_several_servers():
    assert load_config(None, [ON_RAY, "rollout.engine=vllm", "rollout.servers=3"]).rollout.starts_servers
    assert load_config(None, [ON_RAY, "rollout.engine=serve", "rollout.servers=3"]).rollout.starts_servers
    for words, says in {
        ("rollout.engine=vllm",): "launcher=ray a run starts vLLM itself",
        ("rollout.engine=sglang", ON_RAY): "needs rollout.url",
        ("rollout.engine=serve", "rollout.servers=2"): r"rollout\.servers 2 are started on Ray only",
        ("rollout.engine=embedded", "rollout.servers=2", ON_RAY): r"rollout\.servers 2 are started on Ray only",
    }.items():
        with pytest.raises(ConfigError, match=says):
            load_config(None, words)


def test_ranks_learn_of_started_servers_and_settings_do_not_hold_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    servers = StartedServers(("http://h:1", "http://h:2"), "a-secret")
    assert "secret" not in repr(servers)
    tell_started_servers(servers)
    assert started_server_urls() == servers.urls
    with own_server(
        load_config(None, [ON_RAY, "rollout.engine=vllm"]), tmp_path, None, CharacterTokenizer("12.")
    ) as rollout:
        assert rollout.url == servers.urls
        assert rollout.server_weights == tmp_path / "server" / "weights"
        assert read_api_key(rollout.api_key_from) == "a-secret"
        assert "secret" not in rollout.model_dump_json()


@contextmanager
def started(tmp_path, program, **options):
    server = ServerProcess([sys.executable, "-c", program], os.environ, tmp_path / "log", **options)
    try:
        yield server
    finally:
        server.stop()


def test_a_server_is_found_by_the_address_that_it_prints_and_ends_with_its_input(tmp_path):
    (tmp_path / "log").write_text("policy at http://10.0.0.1:1/v1 (of an earlier start)\n")
    program = "import sys; print('x at http://10.0.0.1:7/v1 (y)', flush=True); sys.stdin.read()"
    with started(tmp_path, program) as server:
        assert server.wait_for_address(60.0) == "http://10.0.0.1:7"
        assert server.wait_for_end(0.05) is None
    assert server.wait_for_end(0.0) == 0


def test_a_server_that_ends_or_stays_silent_is_told_from_one_that_runs(tmp_path):
    with started(tmp_path, "print('no such option'); raise SystemExit(3)") as server:
        with pytest.raises(EngineError, match="the rollout server ended; it printed last: no such option"):
            server.wait_for_address(60.0)
        assert server.wait_for_end(0.0) == 3
    with started(tmp_path, "import time; time.sleep(600)", url="http://127.0.0.1:9", stopping_seconds=0.1) as silent:
        assert silent.wait_for_address(0.05) is None
    assert silent.wait_for_end(0.0) == -signal.SIGKILL


GUARDED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{end}
"""


@contextmanager
def guarded(program):
    """Start a guard of a program; yield it, and the process id of what the program started."""
    command = [sys.executable, "-m", "relibra.rl.rollout.started.guard", sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard:
        yield guard, int(guard.stdout.readline())


def test_a_guarded_program_ends_with_all_that_it_started():
    with guarded(GUARDED.format(end="raise SystemExit(5)")) as (guard, child):
        assert guard.wait(60) == 5
        wait_until_gone([child], 10)


@pytest.mark.parametrize("killed", [False, True])
def test_a_guarded_program_ends_when_nobody_holds_its_input(killed):
    with guarded(GUARDED.format(end="time.sleep(600)")) as (guard, child):
        time.sleep(0.2)
        assert alive(child)
        assert guard.poll() is None
        if killed:
            guard.kill()  # as Ray does
        guard.stdin.close()
        assert guard.wait(60) == (-signal.SIGKILL if killed else 128 + signal.SIGTERM)
        wait_until_gone([child], 10)


def test_a_program_that_is_not_there_is_named():
    command = [sys.executable, "-m", "relibra.rl.rollout.started.guard", "/no/such/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 127
    assert done.stderr == "/no/such/python cannot be started: No such file or directory\n"
