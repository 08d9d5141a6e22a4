"""Launch a run: start its processes and wait for them, or run as a rank that `torchrun` started.

Imports no torch, so that the waiting process starts fast and uses little memory.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from relibra.environment import STOP_SIGNALS, keep_hub_offline, keep_torch_quiet, launched_rank
from relibra.errors import INSTALL_TRAINING, ConfigError, EngineError
from relibra.printable import printable
from relibra.rl.config.model_folder import check_expert_ranks, check_model_path, names_hub
from relibra.rl.config.run_config import RunConfig, describe_training
from relibra.rl.run.run_folder import (
    has_checkpoint,
    is_unused,
    latest_checkpoint,
    locked_run_folder,
    open_or_create,
    remove_if_unused,
)
from relibra.rl.run.stderr_writer import lenient_stderr
from relibra.rl.run.worker import LAST_WORDS, MESSAGE_BYTES, Exit, run_launched, run_worker
from relibra.rl.tasks.make import check_task

MAX_RESTARTS = 3
"""Restarts of a supervised run without a newer checkpoint; with one they are counted anew."""
GRACE_SECONDS = 10.0
"""Seconds that other ranks get to report their own errors after one failed, and that a rank gets to end after its last
word, before they are killed."""
STOPPED_SECONDS = 30.0
"""Seconds beyond `parallel.heartbeat_seconds` after which a stopped rank ends the run: ranks notice it themselves
before, with their stacks, except while they join and leave the group."""
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Finished:
    """Result of a run: its folder, and whether it is complete (False: stopped by Ctrl-C)."""

    run: Path
    complete: bool


class LostRankError(EngineError):
    """A rank was killed, hung or crashed, none failed with an error that would come again, and nobody asked to stop."""


@lenient_stderr()
def launch(config: RunConfig, resume: Path | None = None, *, supervise: bool = False) -> Finished | None:
    """Run a configuration to its end, or until Ctrl-C, which lets the current step finish.

    resume      folder of a run to resume; None: a new run
    supervise   after a lost rank, start again from the last checkpoint, MAX_RESTARTS times without a newer one
    returns     None under `torchrun` on every rank but the first
    raises      ConfigError if a package is missing or the run folder cannot be created; EngineError if a rank failed
                or was killed: the run folder keeps the finished steps
    """
    for package in ("torch", "transformers", "accelerate", "tensorboard"):
        if find_spec(package) is None:
            raise ConfigError(f"training needs the package {package!r}: {INSTALL_TRAINING}")
    if config.model.path:
        check_model_path(config.model.path)
        if not names_hub(config.model.path):
            keep_hub_offline()
    launched = launched_rank()
    if launched is None or launched.rank == 0:
        for line in describe_training(config):
            print(printable(line), file=sys.stderr, flush=True)
    if launched is not None:
        if supervise:
            raise ConfigError(
                "--supervise starts again the processes that relibra started: under torchrun leave it out and use "
                "torchrun's --max-restarts, after which a run continues from its last checkpoint"
            )
        run, complete = run_launched(config, launched, resume)
        if launched.rank != 0:
            return None
        if not complete:
            _print_resume_hint(run)
        return Finished(run, complete)
    if config.model.path:
        check_expert_ranks(config.model.path, config.parallel.ranks)
    check_task(config.task, config.evaluation.prompts if config.evaluation.every else 0)
    if config.follows_plans:
        _prepare_cluster(config)
    run = open_or_create(config, resume)
    if resume is not None:
        with locked_run_folder(run):  # fail before processes start if the run is in use; rank 0 locks it later
            pass
    print(f"starting {config.parallel.ranks} processes; run folder {printable(str(run))}", file=sys.stderr, flush=True)
    try:
        complete = _run_supervised(config, run) if supervise else _run_processes(config, run)
    except KeyboardInterrupt:
        _print_resume_hint(run)
        raise
    finally:
        if resume is None:
            remove_if_unused(run)
    if not complete:
        _print_resume_hint(run)
    return Finished(run, complete)


def _prepare_cluster(config: RunConfig) -> None:
    """Measure the machine of `plan.cluster` if it asks for that; raise ClusterError, before processes start, if bad."""
    from relibra.calibration.machine import check_cluster, measure_cluster

    if config.plan.cluster == "measure":
        print("plan.cluster 'measure': measuring this machine, or reading its measurement", file=sys.stderr, flush=True)
        print(f"plan.cluster: {measure_cluster(config.parallel.ranks)}", file=sys.stderr, flush=True)
    else:
        check_cluster(config.plan.cluster)


def _run_supervised(config: RunConfig, run: Path) -> bool:
    """Run the processes, and again from the last checkpoint after a lost rank."""
    checkpoint, left = latest_checkpoint(run), MAX_RESTARTS
    while True:
        try:
            return _run_processes(config, run)
        except LostRankError as error:
            before, checkpoint = checkpoint, latest_checkpoint(run)
            left = left if checkpoint == before else MAX_RESTARTS
            if checkpoint is None or not left:
                raise
            left -= 1
            print(printable(str(error)), file=sys.stderr)
            again = f"restarting from {checkpoint}, {left} more without a newer checkpoint"
            print(printable(again), file=sys.stderr, flush=True)


def _run_processes(config: RunConfig, run: Path) -> bool:
    context = multiprocessing.get_context("spawn")
    keep_torch_quiet()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # from here on, no other program can take the port
        port = listener.getsockname()[1]
        pipes = [context.Pipe(duplex=False) for _ in range(config.parallel.ranks)]
        processes: list[BaseProcess] = [
            context.Process(
                target=run_worker,
                args=(rank, config.model_dump_json(), str(run), port, listener if rank == 0 else None, last_word),
                name=f"rank {rank}",
            )
            for rank, (_, last_word) in enumerate(pipes)
        ]
        words = [_LastWord(reader) for reader, _ in pipes]
        forward = _InterruptForwarder(processes)
        try:
            _start(processes)
            listener.close()
            stopped = _wait(processes, words, config.parallel.heartbeat_seconds + STOPPED_SECONDS)
            codes = [process.exitcode for process in processes]  # None: still waiting for peers of a failed rank
        finally:
            _end(processes)
            forward.restore()
    ended = codes
    codes = [_told(code, word.read()) for code, word in zip(ended, words, strict=True)]
    _print_late_crashes(ended, codes)
    if all(code in (Exit.DONE, Exit.STOPPED) for code in codes):
        return all(code == Exit.DONE for code in codes)
    _print_messages([word.read().decode(errors="ignore").strip() for word in words], codes)
    kind = EngineError if Exit.FAILED in codes or forward.asked else LostRankError
    raise kind(_explain_failure(codes, stopped, run))


class _LastWord:
    """What a rank sends: one of `LAST_WORDS`, an error message, or nothing."""

    def __init__(self, reader: Connection) -> None:
        self._reader, self._word = reader, b""

    def read(self) -> bytes:
        """Return it; empty: nothing was sent yet."""
        if not self._word and self._reader.poll():
            self._word = self._reader.recv_bytes(MESSAGE_BYTES)
        return self._word


def _told(code: int | None, last_word: bytes) -> int | None:
    """Return the exit code of a rank, or that of its last word, after which nothing counts any more.

    returns   `Exit.LEFT` for one that ended by itself without a last word or a traceback
    """
    for said, word in LAST_WORDS.items():
        if last_word == word:
            return said
    if code is None or code < 0 or code == Exit.CRASHED:
        return code
    return code if last_word and code not in LAST_WORDS else Exit.LEFT


def _print_late_crashes(ended: Sequence[int | None], codes: Sequence[int | None]) -> None:
    """Say which ranks crashed after their last word."""
    for rank, (exit_code, code) in enumerate(zip(ended, codes, strict=True)):
        if code in LAST_WORDS and exit_code is not None and exit_code < 0 and exit_code != -signal.SIGKILL:
            crashed = f"rank {rank} had done its work when its process was ended by {_signal_name(-exit_code)}"
            print(crashed, file=sys.stderr, flush=True)


def _print_messages(messages: Sequence[str], codes: Sequence[int | None]) -> None:
    """Print each different message of the ranks once; those about lost peers only if there is no other cause."""
    caused = any(code not in (None, Exit.DONE, Exit.STOPPED, Exit.LOST_PEER) for code in codes)
    causes = [text for text, code in zip(messages, codes, strict=True) if not (caused and code == Exit.LOST_PEER)]
    for message in dict.fromkeys(causes):
        ranks = [str(rank) for rank, own in enumerate(messages) if own == message]
        if message:
            print(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {message}", file=sys.stderr, flush=True)


class _InterruptForwarder:
    """Forwards the first Ctrl-C or SIGTERM to the ranks, and raises KeyboardInterrupt at the second."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes = processes
        self._count = 0
        self._before = {number: signal.signal(number, self._on_interrupt) for number in STOP_SIGNALS}

    @property
    def asked(self) -> bool:
        """Return whether the run was asked to stop."""
        return self._count > 0

    def restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        print(f"stopping after this step; {again} to stop at once", file=sys.stderr, flush=True)
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)


def _start(processes: list[BaseProcess]) -> None:
    resource_tracker.ensure_running()  # starting it later would unblock signals
    with _blocked_interrupts():
        for process in processes:
            process.start()


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block `STOP_SIGNALS`; processes started inside inherit the block until they handle it (`StopRequest`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(processes: list[BaseProcess], words: Sequence[_LastWord], stopped_seconds: float) -> list[int]:
    """Wait until all ranks ended, until GRACE_SECONDS after the first failure, or until ranks are stopped for long.

    A rank that is still there GRACE_SECONDS after one of `LAST_WORDS` is killed.

    stopped_seconds   in which a process is stopped (SIGSTOP)
    returns           the ranks that are
    """
    running = dict(enumerate(processes))
    leave_by: dict[int, float] = {}  # of ranks that have said a last word
    polls_R = [0] * len(processes)  # in which a rank was stopped, one after another
    deadline = None
    while running:
        ready = multiprocessing.connection.wait([one.sentinel for one in running.values()], timeout=POLL_SECONDS)
        if not ready:
            polls_R = [(polls + 1) * _is_stopped(process) for polls, process in zip(polls_R, processes, strict=True)]
            stopped = [rank for rank, polls in enumerate(polls_R) if polls * POLL_SECONDS > stopped_seconds]
            if stopped or (deadline is not None and time.monotonic() > deadline):
                return stopped
        else:
            time.sleep(0.01)  # a sentinel closes a moment before there is an exit code
        for rank, process in list(
            running.items()
        ):  # also of closed sentinels: a process that a reward forked has a copy
            ended = process.exitcode is not None
            done = words[rank].read() in LAST_WORDS.values()
            if ended:
                del running[rank]
                if not done and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
            elif done and time.monotonic() > leave_by.setdefault(rank, time.monotonic() + GRACE_SECONDS):
                left = "threads or processes that a reward started did not end"
                print(f"rank {rank} has done its work, and is ended: {left}", file=sys.stderr, flush=True)
                process.kill()
                process.join()
    return []


def _is_stopped(process: BaseProcess) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a terminal; elsewhere than on Linux False."""
    if sys.platform != "linux" or process.exitcode is not None or process.pid is None:
        return False
    try:
        found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it ended just now
        return False
    return found is not None and found.si_code == os.CLD_STOPPED


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


def _explain_failure(codes: Sequence[int | None], stopped: Sequence[int], run: Path) -> str:
    """Return which ranks ended the run and the next step; a lost peer counts only if there is no other cause."""
    causes = [f"the process of rank {rank} is stopped (SIGSTOP)" for rank in stopped]
    causes += [
        f"rank {rank} was killed by {_signal_name(-code)}"
        for rank, code in enumerate(codes)
        if code is not None and code < 0
    ]
    left = [str(rank) for rank, code in enumerate(codes) if code == Exit.LEFT]
    if left:
        causes.append(
            f"rank{'s' * (len(left) > 1)} {', '.join(left)} ended before the run was complete, without an error: does "
            "the reward, or a library, call os._exit?"
        )
    failed = [str(rank) for rank, code in enumerate(codes) if code in (Exit.FAILED, Exit.CRASHED)]
    if failed:
        causes.append(f"rank{'s' * (len(failed) > 1)} {', '.join(failed)} failed (see above)")
    if not causes:
        lost = ", ".join(str(rank) for rank, code in enumerate(codes) if code == Exit.LOST_PEER)
        causes.append(f"rank {lost} lost its peers (see above)")
    ended = f"the run ended early: {', '.join(causes)}"
    if not (run / "config.json").exists():  # removed by somebody else
        return ended
    if is_unused(run):
        return f"{ended}; no step was finished, and {run} was removed"
    next_step = "start a new run"
    if has_checkpoint(run):
        next_step = _resume_hint(run)
    return f"{ended}; {run} keeps every finished step; {next_step}"


def _print_resume_hint(run: Path) -> None:
    if has_checkpoint(run):
        print(_resume_hint(run), file=sys.stderr, flush=True)


def _resume_hint(run: Path) -> str:
    """Return how to continue a run that has a checkpoint."""
    return f"to resume from its last checkpoint: relibra train --resume {shlex.quote(str(run))}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
