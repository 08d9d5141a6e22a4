"""`RunningWorkers`: the worker processes of a deployment on this machine, started and stopped together."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relibra.environment import module_program, worker_environment
from relibra.errors import ConfigError, EngineError
from relibra.planning.deployment.expert_placement import ExpertPlacement
from relibra.planning.deployment.expert_workers import place_by_number
from relibra.serving.channel import Channel, worker_address
from relibra.serving.layout import WorkerLayout, experts_of, place_copies
from relibra.serving.roles.checkpoint import read_structure

Layers = Sequence[Sequence[int]]
"""Experts of a worker in each layer."""
FolderStamp = tuple[tuple[str, int, int], ...]
"""Name, bytes and time of the last change of each file of weights."""
_log = logging.getLogger(__name__)

LOADING_SECONDS = 1800.0
"""How long workers may take to load."""
STOPPING_SECONDS = 1.0
"""How long workers may take to end once their connection is closed, before they are killed."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker process; `control` is the API server's end of its connection."""

    role: str
    number: int
    process: subprocess.Popen[bytes]
    control: Channel

    @property
    def name(self) -> str:
        """Role and number."""
        return f"{self.role} worker {self.number}"


class RunningWorkers:
    """A deployment that is running; a context manager that stops it."""

    def __init__(
        self,
        folder: Path,
        layout: WorkerLayout,
        *,
        placement: ExpertPlacement | None = None,
        dtype: str = "auto",
        threads: int = 1,
        timeline: bool = False,
    ) -> None:
        """Start all workers and wait until attention is connected to the experts.

        `experts` then has the address of each expert worker and the experts that it holds, `most_cache_bytes` what the
        KV cache of an attention worker takes when it is full.

        placement   experts of each worker; None: by number, with spare copies (`place_copies`)
        threads     of torch in each worker
        timeline    workers record what they do and when
        raises      ConfigError, EngineError for a model or layout that cannot be split, before any process starts;
                    afterwards EngineError with the sentence of the first worker that failed
        """
        structure = read_structure(folder, dtype)
        num_layers, num_experts = len(structure.experts), structure.num_experts
        if placement is None:
            self.home_LNE = np.stack([place_by_number(num_experts, layout.experts, layout.spare_experts)] * num_layers)
            held_LNE = place_copies(self.home_LNE, layout.spare_experts)
        else:
            self.home_LNE, held_LNE = placement.home_LNE, placement.held_LNE
            layers, workers, experts = held_LNE.shape
            if (placement.layer_ids, experts) != (structure.layer_ids, num_experts) or workers != layout.experts:
                raise ConfigError(
                    f"the placement is of {layers} layers with {experts} experts on {workers} workers, {folder} has "
                    f"{num_layers} with {num_experts} on {layout.experts}: make one of this model (relibra serve place)"
                )
        self.layout, self.layer_ids, self.num_experts = layout, structure.layer_ids, num_experts
        self.workers: list[Worker] = []
        self.experts: list[tuple[str, Layers]] = [("", own) for own in experts_of(held_LNE)]
        self._starts, self._stopping = 0, False
        self._sockets = Path(tempfile.mkdtemp(prefix="relibra-"))
        secret = secrets.token_bytes(16).hex()
        self._spec: dict[str, Any] = {
            "folder": str(folder),
            "layout": asdict(layout),
            "dtype": dtype,
            "threads": threads,
            "secret": secret,
            "timeline": timeline,
        }
        self._stamp = weights_stamp(folder)
        try:
            for number in range(layout.experts):
                self.workers.append(self._start("experts", number))
            for number in range(layout.attention):
                self.workers.append(self._start("attention", number))
            end = time.monotonic() + LOADING_SECONDS
            for number in range(layout.experts):
                self._await_experts(number, end)
            facts = [self._connect(worker, end) for worker in self.attention_workers]
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

    def stop(self) -> None:
        """End all workers: their connections close, and those that stay are killed."""
        self._stopping = True  # a worker that is just being started again is not waited for
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_from(self, folder: Path, stamp: FolderStamp) -> None:
        """Let workers that are started from now on load another folder of the same model.

        stamp   `weights_stamp` of the folder before the present workers read it
        """
        self._spec["folder"], self._stamp = str(folder), stamp

    def restart_experts(self, number: int) -> None:
        """Start an expert worker again, and wait for it; raises EngineError if it fails or the weights changed."""
        self._end(self.workers[number])
        self.workers[number] = self._start("experts", number)
        self._await_experts(number, time.monotonic() + LOADING_SECONDS)
        _log.warning("%s is back", self.workers[number].name)

    def restart_attention(self, number: int) -> list[tuple[str, Layers]]:
        """Start an attention worker again; return where it found the experts; raises as `restart_experts` does."""
        index = self.layout.experts + number
        self._end(self.workers[index])
        worker = self.workers[index] = self._start("attention", number)
        met = self._connect(worker, time.monotonic() + LOADING_SECONDS)["met"]
        _log.warning("%s is back", worker.name)
        return met

    def _end(self, worker: Worker) -> None:
        """End a worker that is started again next, and log why."""
        _log.warning("%s is started again: %s", worker.name, _ending(worker.process))
        worker.process.kill()
        worker.process.wait()
        worker.control.close()

    def _await_ready(self, worker: Worker, end: float) -> Any:
        """Wait until a worker has loaded, return its answer; raises EngineError where others may have other weights."""
        answer, folder = self._answer(worker, "ready", end), self._spec["folder"]
        if weights_stamp(Path(folder)) != self._stamp:
            raise EngineError(
                f"the files in {folder} have changed since the other workers read them: keep a folder of weights as it "
                "is until the next update"
            )
        return answer

    def _await_experts(self, number: int, end: float) -> None:
        """Wait until an expert worker has loaded; note its address."""
        self.experts[number] = self._await_ready(self.workers[number], end), self.experts[number][1]

    def _connect(self, worker: Worker, end: float) -> dict[str, Any]:
        """Connect an attention worker to the experts, once it has loaded; return its answer with their addresses."""
        self._await_ready(worker, end)
        met = list(self.experts)
        worker.control.send({"connect": met})
        return {**self._answer(worker, "connect", end), "met": met}

    def new_address(self, number: int) -> str:
        """Return a new address for an expert worker: a used one could reach the former worker."""
        self._starts += 1
        return worker_address(self.layout.transport, self._sockets, f"{number}-{self._starts}")

    def _start(self, role: str, number: int) -> Worker:
        spec = {**self._spec, "role": role, "number": number}
        if role == "experts":
            spec |= {"address": self.new_address(number), "experts": self.experts[number][1]}
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*module_program("relibra.serving.worker_process"), str(theirs.fileno()), role, str(number)],
                pass_fds=[theirs.fileno()],
                env=worker_environment(spec["threads"]),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the API server, which then ends the workers
            )
        control = Channel(ours)
        control.send(spec)
        return Worker(role, number, process, control)

    def _answer(self, worker: Worker, key: str, end: float) -> Any:
        """Wait for a frame of a worker with this key, and return what it holds."""
        try:
            if self._stopping:
                raise ConnectionError
            frame = worker.control.receive(seconds=max(0.1, end - time.monotonic()))
        except TimeoutError as error:
            raise EngineError(f"{worker.name} did not answer ({key}) in time: look at what it printed") from error
        except ConnectionError as error:
            raise EngineError(f"{worker.name} ended while it was starting ({_ending(worker.process)})") from error
        if key not in frame:
            raise EngineError(f"{worker.name}: {frame.get('failed', f'unexpected answer {sorted(frame)}')}")
        return frame[key]


def weights_stamp(folder: Path) -> FolderStamp:
    """Return what changes when a file of weights in a folder is written again; empty without a folder."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((path.name, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended, for a message."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(STOPPING_SECONDS)
        return f"it ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
    return "its process does not end by itself"
