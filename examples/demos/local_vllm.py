"""A vLLM server on this machine, for demos and tests: started, waited for, and stopped with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relibra.environment import server_environment
from relibra.errors import EngineError

FLAGS = ("--dtype", "float32", "--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs")
"""What training in float32 needs of a server (docs/guides/servers.md)."""
_SMALL = ("--kv-cache-memory-bytes", "256M")
"""A cache that leaves memory to the trainer."""
_LAST_LINES = 15


@contextmanager
def local_server(
    python: Path, model: Path, log: Path, *, port: int = 0, flags: Sequence[str] = FLAGS, start_seconds: float = 600.0
) -> Iterator[str]:
    """Start a server on the loopback interface, yield its address when it answers, and stop all of its processes.

    python    interpreter of the environment that vLLM is installed in
    model     folder that it starts from
    log       file for what it prints
    port      0: a free one
    flags     beside those that keep it small
    raises    EngineError, with the end of the log, where it does not start
    """
    port = port or _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *_SMALL, *flags]
    environment = server_environment(VLLM_SERVER_DEV_MODE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait(process, url, log, start_seconds)
        yield url
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(1.0)
    ended = "ended" if process.poll() is not None else f"did not answer within {seconds:g} s"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    raise EngineError(f"the vLLM server {ended}; the end of {log}:\n{last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a server by SIGTERM, after which it stops its engine; then whatever is left of its session, by SIGKILL."""
    if process.poll() is None:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
