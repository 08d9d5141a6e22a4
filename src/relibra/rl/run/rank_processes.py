"""The processes of the ranks of one machine: start, interrupt, wait, end. Imports no torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from relibra.environment import STOP_SIGNALS, LaunchedRank, StartedServers, keep_torch_quiet
from relibra.rl.run.worker import LAST_WORDS, MESSAGE_BYTES, Exit, run_worker

GRACE_SECONDS = 10.0
"""Seconds that other ranks get to report their own errors after one failed, and that a rank gets to end after its last
word, before they are killed."""
STOPPED_SECONDS = 30.0
"""Seconds beyond `parallel.heartbeat_seconds` after which a stopped rank ends the run: ranks notice it themselves
before, with their stacks, except while they join and leave the group."""
POLL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class EndedRanks:
    """How the processes of some ranks ended.

    codes        exit code of each, or that of its last word; None: it still waited for peers of a failed rank
    last_words   one of `LAST_WORDS`, an error message, or nothing
    stopped      ranks that were stopped (SIGSTOP)
    lost         which nodes were lost with their ranks, in words
    notes        what else is worth a line
    """

    codes: tuple[int | None, ...]
    last_words: tuple[bytes, ...]
    stopped: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class RankProcesses:
    """The processes of the ranks of one machine."""

    def __init__(
        self,
        ranks: Sequence[LaunchedRank],
        config_json: str,
        run: str,
        *,
        address: tuple[str, int],
        listener: socket.socket | None,
        output: Connection | None = None,
        servers: StartedServers | None = None,
    ) -> None:
        """Prepare them.

        address    host and port where all ranks of the run meet
        listener   socket that listens there, if rank 0 is one of these
        output     pipe for what they print; None: where this process prints
        servers    rollout servers that the run has started
        """
        context = multiprocessing.get_context("spawn")
        self._ranks = ranks
        self._listener = listener
        pipes = [context.Pipe(duplex=False) for _ in ranks]
        self._words = [_LastWord(reader) for reader, _ in pipes]
        self._writers = [writer for _, writer in pipes]  # open: at its end a pipe looks as if it had something to read
        self._processes: list[BaseProcess] = [
            context.Process(
                target=run_worker,
                args=(
                    rank,
                    config_json,
                    run,
                    address,
                    listener if rank.rank == 0 else None,
                    last_word,
                    output,
                    servers,
                ),
                name=f"rank {rank.rank}",
            )
            for rank, (_, last_word) in zip(ranks, pipes, strict=True)
        ]

    def start(self) -> None:
        """Start them; stop signals wait in them until they can handle one."""
        keep_torch_quiet()
        resource_tracker.ensure_running()  # starting it later would unblock signals
        with _blocked_interrupts():
            for process in self._processes:
                process.start()
        if self._listener is not None:
            self._listener.close()

    def interrupt(self) -> None:
        """Ask them to stop after the present step."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    def wait(self, heartbeat_seconds: float) -> EndedRanks:
        """Wait until all ended, until GRACE_SECONDS after the first failure, or until one is stopped for long; end all.

        heartbeat_seconds   parallel.heartbeat_seconds
        """
        stopped, late = _wait(self._processes, self._words, heartbeat_seconds + STOPPED_SECONDS)
        ended = [process.exitcode for process in self._processes]  # None: still waiting for peers of a failed rank
        self.end()
        words = [word.read() for word in self._words]
        codes = [_told(code, word) for code, word in zip(ended, words, strict=True)]
        numbers = [rank.rank for rank in self._ranks]
        left = "threads or processes that a reward started did not end"
        notes = [f"rank {numbers[place]} has done its work, and is ended: {left}" for place in late]
        return EndedRanks(
            codes=tuple(codes),
            last_words=tuple(words),
            stopped=tuple(numbers[place] for place in stopped),
            notes=(*notes, *_late_crashes(numbers, ended, codes)),
        )

    def kill(self) -> None:
        """Kill those that still run."""
        for process in self._processes:
            if process.is_alive():
                process.kill()

    def end(self) -> None:
        """Kill those that still run, and wait until they are gone."""
        self.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join()


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


def _late_crashes(numbers: Sequence[int], ended: Sequence[int | None], codes: Sequence[int | None]) -> list[str]:
    """Return in words which ranks crashed after their last word."""
    return [
        f"rank {rank} had done its work when its process was ended by {signal_name(-exit_code)}"
        for rank, exit_code, code in zip(numbers, ended, codes, strict=True)
        if code in LAST_WORDS and exit_code is not None and exit_code < 0 and exit_code != -signal.SIGKILL
    ]


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block `STOP_SIGNALS`; processes started inside inherit the block until they handle it (`StopRequest`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(
    processes: Sequence[BaseProcess], words: Sequence[_LastWord], stopped_seconds: float
) -> tuple[list[int], list[int]]:
    """Wait until all ranks ended, until GRACE_SECONDS after the first failure, or until ranks are stopped for long.

    A rank that is still there GRACE_SECONDS after one of `LAST_WORDS` is killed.

    stopped_seconds   in which a process is stopped (SIGSTOP)
    returns           the places of those that are; and of those that were killed after their last word
    """
    running = dict(enumerate(processes))
    leave_by: dict[int, float] = {}  # of ranks that have said a last word
    polls_R = [0] * len(processes)  # in which a rank was stopped, one after another
    late: list[int] = []
    deadline = None
    while running:
        ready = multiprocessing.connection.wait([one.sentinel for one in running.values()], timeout=POLL_SECONDS)
        if not ready:
            polls_R = [(polls + 1) * _is_stopped(process) for polls, process in zip(polls_R, processes, strict=True)]
            stopped = [rank for rank, polls in enumerate(polls_R) if polls * POLL_SECONDS > stopped_seconds]
            if stopped or (deadline is not None and time.monotonic() > deadline):
                return stopped, late
        else:
            time.sleep(0.01)  # a sentinel closes a moment before there is an exit code
        for rank, process in list(running.items()):  # also of open sentinels: what a reward forked has a copy
            ended = process.exitcode is not None
            done = words[rank].read() in LAST_WORDS.values()
            if ended:
                del running[rank]
                if not done and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
            elif done and time.monotonic() > leave_by.setdefault(rank, time.monotonic() + GRACE_SECONDS):
                late.append(rank)
                process.kill()
                process.join()
    return [], late


def _is_stopped(process: BaseProcess) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a terminal; elsewhere than on Linux False."""
    if sys.platform != "linux" or process.exitcode is not None or process.pid is None:
        return False
    try:
        found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it ended just now
        return False
    return found is not None and found.si_code == os.CLD_STOPPED
