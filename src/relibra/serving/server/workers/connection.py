"""`Connection`: one worker as the API server sees it, the choices it runs, and whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from relibra.serving.launch import LOADING_SECONDS, Worker
from relibra.serving.messages import read_frame, write_frame
from relibra.serving.server.choice import Choice

_log = logging.getLogger(__name__)
_ANSWERS = ("weights", "hold", "load", "counters", "timeline")
HEALTH_SECONDS = 1.0
"""Time after which a worker is asked whether it is there."""
SHOWN_SECONDS = 3.0
"""Silence from which on it is shown."""
LEAST_PATIENCE = 10.0
"""Least silence from which on a worker hangs: a machine may be busy."""


class LostRecord(NamedTuple):
    """A worker whose process has ended at a Unix time, and with it what it had recorded."""

    worker: str
    at: float


@dataclass(eq=False)
class Connection:
    """A worker.

    lost      why it is gone; empty: it is not
    for_good  it does not come back
    running   choices by their numbers
    answers   to what was asked, by their keys; None: it has ended
    silence   seconds since it was asked something that it did not answer, as `check_health` counts them; 0: it has
              answered
    """

    role: str
    number: int
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    running: dict[int, Choice] = field(default_factory=dict)
    answers: defaultdict[str, asyncio.Queue[Any]] = field(default_factory=lambda: defaultdict(asyncio.Queue))
    lost: str = ""
    for_good: bool = False
    silence: float = 0.0

    @property
    def name(self) -> str:
        """Role and number."""
        return f"{self.role} worker {self.number}"

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped, by SIGSTOP or a debugger."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] in "Tt"
        return False

    def state(self) -> dict[str, Any]:
        """Return what `/health` shows of it: who it is, and since when it does not answer.

        "ready"; "silent": it does not answer; "lost": it is gone, and comes back where it can
        """
        silence = self.silence if not self.lost and self.silence >= SHOWN_SECONDS else 0.0
        state = "lost" if self.lost else "silent" if silence else "ready"
        who = {"role": self.role, "number": self.number, "pid": self.pid}
        return {**who, "state": state, "silent_seconds": silence}

    def send(self, frame: dict[str, Any]) -> None:
        """Queue a frame to the worker, unless it is gone."""
        if not self.lost:
            write_frame(self.writer, frame)

    async def read(self) -> dict[str, Any] | None:
        """Wait for a frame, which ends a silence, and hand over the answers in it; None: the worker is gone."""
        frame = await read_frame(self.reader)
        if frame is not None:
            self.silence = 0.0
            for key in frame.keys() & set(_ANSWERS):
                self.answers[key].put_nowait(frame[key])
        return frame

    def check_health(self) -> None:
        """Ask whether it is there, once per silence; call it every HEALTH_SECONDS.

        Calls are counted instead of time, so that a server that was stopped itself blames no worker.
        """
        if not self.silence:
            self.send({"health": True})
        self.silence += HEALTH_SECONDS

    async def ask(self, what: str, seconds: float) -> Any:
        """Return the worker's answer; None: it is gone, or does not answer in time."""
        answers = self.answers[what]
        while not answers.empty():
            answers.get_nowait()  # of a question that was given up
        if self.lost:
            return None
        self.send({what: True})
        try:
            return await asyncio.wait_for(answers.get(), seconds)
        except TimeoutError:
            return None

    def end(self, why: str) -> None:
        """Note that the worker is gone; whoever waits for an answer gets None."""
        self.lost = why
        for key in _ANSWERS:
            self.answers[key].put_nowait(None)

    def give_up(self, why: str) -> None:
        """Note that the worker does not come back, and log why."""
        self.lost, self.for_good = f"{self.name} {why}; stop this server and start it again", True
        _log.error("%s", self.lost)


async def change_weights(
    workers: Sequence[Connection], command: dict[str, str], seconds: float = LOADING_SECONDS
) -> list[dict[str, Any] | None]:
    """Let workers read or use weights; return their answers, None of those that end.

    seconds   that they may take; a worker that hangs is then given up, and started again
    """

    async def change(worker: Connection) -> dict[str, Any] | None:
        try:
            return await asyncio.wait_for(worker.answers["weights"].get(), seconds)
        except TimeoutError:
            worker.writer.transport.abort()  # who reads from it takes the worker for ended
            return None

    for worker in workers:
        worker.send({"weights": command})
    return list(await asyncio.gather(*map(change, workers)))


async def connection_to(worker: Worker) -> Connection:
    """Take over the connection of a worker."""
    streams = await asyncio.open_connection(sock=worker.control.take_socket())
    return Connection(worker.role, worker.number, worker.process.pid, *streams)
