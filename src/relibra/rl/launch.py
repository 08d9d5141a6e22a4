"""Starting a run: as many processes as the configuration asks for, or as the one rank that `torchrun` started."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from relibra.environment import LaunchedRank, launched_rank, set_rendezvous
from relibra.errors import EngineError, RelibraError
from relibra.rl.config import RunConfig, with_ranks

if TYPE_CHECKING:
    import torch

GRACE_SECONDS = 10.0
"""How long ranks may go on after one of them failed, to report themselves before they are ended."""

_STOPPED, _FAILED, _CRASHED = 130, 1, 3


@dataclass(frozen=True)
class Finished:
    """How a run ended: its folder, and whether all steps were made (False: stopped by Ctrl-C)."""

    run: Path
    complete: bool


def launch(config: RunConfig) -> Finished | None:
    """Run a configuration to its end, or until Ctrl-C, which lets the current step finish.

    returns   None on every rank but the first under `torchrun`
    raises    EngineError when a rank failed or was killed; the run folder keeps the finished steps
    """
    from relibra.rl.run_folder import create_run_folder

    launched = launched_rank()
    if launched is not None:
        return _run_launched(config, launched)
    run = create_run_folder(config)
    return Finished(run, _run_processes(config, run))


def _run_launched(config: RunConfig, launched: LaunchedRank) -> Finished | None:
    """Train as one of the ranks that torchrun started."""
    import torch.distributed as dist

    from relibra.rl.ranks import broadcast_json, joined_ranks
    from relibra.rl.run_folder import create_run_folder
    from relibra.rl.trainer import train_rank

    config = with_ranks(config, launched.num_ranks)
    device = _device(launched.local_rank)
    with joined_ranks(config.parallel.timeout_seconds, device):
        run = Path(broadcast_json(str(create_run_folder(config)) if dist.get_rank() == 0 else None))
    complete = train_rank(config, run, device)
    return Finished(run, complete) if launched.rank == 0 else None


def _run_processes(config: RunConfig, run: Path) -> bool:
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    processes: list[BaseProcess] = [
        context.Process(target=_worker, args=(rank, config.model_dump_json(), str(run), port), name=f"rank {rank}")
        for rank in range(config.parallel.ranks)
    ]
    forward = _InterruptForwarder(processes)
    try:
        for process in processes:
            process.start()
        _wait(processes)
    finally:
        forward.restore()
        _end(processes)
    codes = [process.exitcode for process in processes]
    if all(code in (0, _STOPPED) for code in codes):
        return all(code == 0 for code in codes)
    raise EngineError(_explain(codes, run))


def _worker(rank: int, config_json: str, run: str, port: int) -> None:
    """Be one rank; the exit code says how it ended."""
    config = RunConfig.model_validate_json(config_json)
    _die_with_parent()
    set_rendezvous(rank, config.parallel.ranks, port, config.parallel.threads_per_rank)
    try:
        from relibra.rl.trainer import train_rank

        complete = train_rank(config, Path(run), _device(rank))
    except RelibraError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(_FAILED)
    except BaseException:  # noqa: BLE001 - process boundary: report, and let the parent explain
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(_CRASHED)  # not sys.exit: threads of a broken process group may never end
    sys.exit(0 if complete else _STOPPED)


def _die_with_parent() -> None:
    """End this process at once when the one that started it is gone, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent process"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(_CRASHED)

    threading.Thread(target=watch, daemon=True).start()


class _InterruptForwarder:
    """Passes the first Ctrl-C on to the ranks, and ends them at the second."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes = processes
        self._count = 0
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)

    def restore(self) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
        print("stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)


def _wait(processes: list[BaseProcess]) -> None:
    """Wait until all ranks ended; after the first failure only for GRACE_SECONDS more."""
    running = {process.sentinel: process for process in processes}
    timeout = None
    while running:
        ended = multiprocessing.connection.wait(list(running), timeout=timeout)
        if not ended:
            return
        for sentinel in ended:
            assert isinstance(sentinel, int), "we wait for process sentinels only"
            process = running.pop(sentinel)
            process.join()
            if process.exitcode not in (0, _STOPPED):
                timeout = GRACE_SECONDS


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


def _explain(codes: list[int | None], run: Path) -> str:
    killed = [
        f"rank {rank} was ended by {signal.Signals(-code).name}" for rank, code in enumerate(codes) if code and code < 0
    ]
    failed = [f"rank {rank} failed" for rank, code in enumerate(codes) if code in (_FAILED, _CRASHED)]
    # A rank that failed by itself explains more than one that was ended because of it.
    cause = failed[0] + " (its message stands above)" if failed else killed[0] if killed else f"exit codes {codes}"
    others = f"; {'; '.join(killed)}" if failed and killed else ""
    return f"the run ended early: {cause}{others}; {run} keeps every finished step: look there, or start again"


def _device(local_rank: int) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
