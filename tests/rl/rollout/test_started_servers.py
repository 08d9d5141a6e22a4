"""The rollout server that a run starts: its command and its process."""

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from relibra.errors import EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout import own_server
from relibra.rl.rollout.own_server import ServerProcess, serve_command


def test_options_of_the_user_come_last():
    words = serve_command(load_config(None, ["rollout.engine=serve", "rollout.server_options=--threads 3"]), "model")
    assert words[-2:] == ["--threads", "3"]
    assert words[3:5] == ["serve", "model"]


@contextmanager
def started(tmp_path, program):
    server = ServerProcess([sys.executable, "-c", program], os.environ, tmp_path / "log")
    try:
        yield server
    finally:
        server.stop()


def test_server_is_found_by_its_address_and_ends_with_its_input(tmp_path):
    (tmp_path / "log").write_text("policy at http://10.0.0.1:1/v1 (of an earlier start)\n")
    program = "import sys; print('x at http://10.0.0.1:7/v1 (y)', flush=True); sys.stdin.read()"
    with started(tmp_path, program) as server:
        assert server.wait_for_address(60.0) == "http://10.0.0.1:7"
        assert server.wait_for_end(0.05) is None
    assert server.wait_for_end(0.0) == 0


def test_ended_or_silent_server_is_told_from_a_running_one(tmp_path, monkeypatch):
    with started(tmp_path, "print('no such option'); raise SystemExit(3)") as server:
        with pytest.raises(EngineError, match="the rollout server ended; it printed last: no such option"):
            server.wait_for_address(60.0)
        assert server.wait_for_end(0.0) == 3
    monkeypatch.setattr(own_server, "STOPPING_SECONDS", 0.1)
    late = r"did not start within 0\.05 s"
    with started(tmp_path, "import time; time.sleep(600)") as silent, pytest.raises(EngineError, match=late):
        silent.wait_for_address(0.05)
    assert silent.wait_for_end(0.0) == -signal.SIGKILL
