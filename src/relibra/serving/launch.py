"""`RunningWorkers`: the worker processes of a deployment on this machine, started and stopped together."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from relibra.environment import worker_environment
from relibra.errors import EngineError
from relibra.serving.control import ControlSocket
from relibra.serving.exchange.addresses import worker_address
from relibra.serving.exchange.messages import SECRET_BYTES
from relibra.serving.layout import WorkerLayout

LOADING_SECONDS = 1800.0
"""How long workers may take to load."""
STOPPING_SECONDS = 5.0
"""How long workers may take to end when their front is gone, before they are killed."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker process.

    name      role and number, for messages
    control   the front's end of its control socket
    """

    name: str
    process: subprocess.Popen[bytes]
    control: socket.socket


class RunningWorkers:
    """A deployment that is running; a context manager that stops it."""

    def __init__(
        self, folder: Path, layout: WorkerLayout, *, dtype: str = "auto", threads: int = 1, timeline: bool = False
    ) -> None:
        """Start all workers and wait until attention is connected to the experts.

        `experts_of` then says which experts each expert worker holds, `most_cache_bytes` what the KV cache of an
        attention worker takes when it is full.

        threads   of torch in each worker
        timeline  workers record what they do and when
        raises    ConfigError, EngineError with the sentence of the first worker that failed
        """
        self.layout = layout
        self.workers: list[Worker] = []
        self.experts_of: dict[int, list[int]] = {}
        self._starts = 0
        self._sockets = Path(tempfile.mkdtemp(prefix="relibra-"))
        secret = secrets.token_bytes(SECRET_BYTES).hex()
        self._spec: dict[str, Any] = {
            "folder": str(folder),
            "layout": asdict(layout),
            "dtype": dtype,
            "threads": threads,
            "secret": secret,
            "timeline": timeline,
        }
        try:
            for number in range(layout.experts):
                self.workers.append(self._start("experts", number))
            for number in range(layout.attention):
                self.workers.append(self._start("attention", number))
            end = time.monotonic() + LOADING_SECONDS
            addresses = [self._await_experts(number, end) for number in range(layout.experts)]
            for worker in self.attention_workers:
                self._answer(worker, "ready", end)
                ControlSocket(worker.control).send({"connect": addresses})
            facts = [self._answer(worker, "connected", end) for worker in self.attention_workers]
            self.dtype: str = facts[0]["dtype"]
            self.most_cache_bytes: int = facts[0]["most_cache_bytes"]
        except BaseException:
            self.stop()
            raise

    @property
    def expert_workers(self) -> list[Worker]:
        """Workers that hold experts."""
        return self.workers[: self.layout.experts]

    @property
    def attention_workers(self) -> list[Worker]:
        """Workers that requests go to."""
        return self.workers[self.layout.experts :]

    def counters(self) -> dict[str, dict[str, float]]:
        """Return the counters of each worker by its name; not while a front reads their sockets."""
        found = {}
        for worker in self.workers:
            ControlSocket(worker.control).send({"counters": True})
            found[worker.name] = self._answer(worker, "counters", time.monotonic() + self.layout.timeout)
        return found

    def stop(self) -> None:
        """End all workers: their control sockets close, and those that stay are killed."""
        for worker in self.workers:
            worker.control.close()
        end = time.monotonic() + STOPPING_SECONDS
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def __enter__(self) -> RunningWorkers:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_from(self, folder: Path) -> None:
        """Let workers that are started from now on load another folder of the same model."""
        self._spec["folder"] = str(folder)

    def restart(self, number: int) -> str:
        """Start an expert worker again, and return its address when it has loaded.

        raises   EngineError if it fails to start
        """
        old = self.workers[number]
        old.process.kill()
        old.process.wait()
        old.control.close()
        self.workers[number] = self._start("experts", number)
        return self._await_experts(number, time.monotonic() + LOADING_SECONDS)

    def _await_experts(self, number: int, end: float) -> str:
        """Wait until an expert worker has loaded; note its experts, and return its address."""
        address, self.experts_of[number] = self._answer(self.workers[number], "ready", end)
        return address

    def new_address(self, number: int) -> str:
        """Return an address for an expert worker; one that is used again would reach the worker before."""
        self._starts += 1
        return worker_address(self.layout.transport, self._sockets, f"{number}-{self._starts}")

    def _start(self, role: str, number: int) -> Worker:
        spec = {**self._spec, "role": role, "number": number}
        if role == "experts":
            spec |= {"address": self.new_address(number), "experts": self.experts_of.get(number)}
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "relibra.serving.worker_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=worker_environment(spec["threads"]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the front, which then ends the workers
            )
        ControlSocket(ours).send(spec)
        return Worker(f"{role} worker {number}", process, ours)

    def _answer(self, worker: Worker, key: str, end: float) -> Any:
        """Wait for a frame of a worker with this key, and return what it holds."""
        worker.control.settimeout(max(0.1, end - time.monotonic()))
        try:
            frame = ControlSocket(worker.control).receive()
        except TimeoutError as error:
            raise EngineError(f"{worker.name} did not say that it is {key} in time: look at what it printed") from error
        finally:
            worker.control.settimeout(None)
        if frame is None:
            raise EngineError(f"{worker.name} ended while it was starting ({_ending(worker.process)})")
        if key not in frame:
            raise EngineError(f"{worker.name}: {frame.get('failed', f'unexpected answer {sorted(frame)}')}")
        return frame[key]


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended, for a message."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(STOPPING_SECONDS)
        return f"signal {-code}" if code < 0 else f"exit code {code}"
    return "it still runs"
