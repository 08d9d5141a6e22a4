"""The rollout server that a run starts itself (`rollout.engine=serve`), and stops when it ends."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from relibra.environment import launched_rank, worker_environment
from relibra.errors import ConfigError, EngineError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.served.weights import write_version
from relibra.rl.run.ranks import broadcast_json

_ADDRESS = re.compile(r"at (http://127\.0\.0\.1:\d+)/v1 ")
_POLL_SECONDS = 0.2
STOPPING_SECONDS = 15.0
"""How long a server may take to end, before it is killed."""
_LAST_LINES = 15
_LEAST_CACHE = 1 << 16
"""Tokens of the KV cache of each attention worker, unless responses are long."""


@contextmanager
def own_server(config: RunConfig, run: Path, model: Any) -> Iterator[RolloutSettings]:
    """Start the server of a run that has one; yield the settings of the rollout, with its address; collective.

    run       its folder `server` holds the log of the server, and the weights on their way there
    model     full copy of the policy, which the server starts from
    raises    ConfigError for wrong options; EngineError, with the end of the log, where it does not start
    """
    rollout = config.rollout
    if rollout.engine != "serve":
        yield rollout
        return
    launched = launched_rank()
    if launched is not None and launched.num_local_ranks < launched.num_ranks:
        raise ConfigError(
            "rollout.engine=serve starts a server on the machine of the first rank, and this run has several: start "
            "relibra serve --updates where all ranks reach it, and set rollout.engine=vllm and rollout.url"
        )
    folder, process, told = run / "server", None, None
    if dist.get_rank() == 0:
        try:
            process = _start(config, folder, model)
            told = {"url": _address(process, folder / "log", rollout.start_seconds)}
        except EngineError as error:
            told = {"error": str(error)}
    try:
        told = broadcast_json(told)
        if "error" in told:
            raise EngineError(told["error"])
        found = {"url": (told["url"],), "server_weights": rollout.server_weights or folder / "weights"}
        yield rollout.model_copy(update={**found, "retry_seconds": 0.0})  # nobody else starts it again
    finally:
        if process is not None:
            _stop(process)


def _start(config: RunConfig, folder: Path, model: Any) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    longest = config.rollout.max_prompt + config.rollout.max_response
    start = write_version(model, folder / "start", "the server of the run", 0)
    command = [sys.executable, "-m", "relibra", "serve", str(start), "--port", "0", "--name", "policy"]
    command += ["--updates", "--until-eof", "--dtype", config.model.dtype, "--max-length", str(longest)]
    command += ["--kv-tokens", str(max(_LEAST_CACHE, 8 * longest))]
    command += ["--max-batch", str(config.rollout.max_batch), "--max-waiting", str(1 << 20)]
    command += ["--deadline", str(config.rollout.timeout_seconds * max(1.0, longest / 1024))]
    command += shlex.split(config.rollout.server_options)
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it ends with this process, which alone holds the other end
            stdout=log,
            stderr=log,
            env=worker_environment(1),
            start_new_session=True,
        )


def _address(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    """Wait for the line with the address; raises EngineError with the end of the log."""
    end = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None
        text = log.read_text(errors="replace")
        if found := _ADDRESS.search(text):
            return found.group(1)
        if ended or time.monotonic() > end:
            last = "\n".join(text.splitlines()[-_LAST_LINES:])
            why = "ended" if ended else f"did not start within {seconds:g} s (rollout.start_seconds)"
            _stop(process)
            raise EngineError(f"the rollout server {why}; the end of {log}: {last}")
        time.sleep(_POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: its standard input ends; it is killed where it stays."""
    assert process.stdin is not None, "it was started with a pipe"
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOPPING_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()
