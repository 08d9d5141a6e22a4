"""`Connection`: one worker as the front sees it, the samples it runs, and whether it still says something."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relibra.serving.control import read_frame, write_frame
from relibra.serving.engine.request import SamplingParameters
from relibra.serving.launch import LOADING_SECONDS, Worker

_log = logging.getLogger(__name__)
_ANSWERS = ("weights", "ready", "load", "counters", "timeline")
PULSE_SECONDS = 1.0
"""Time after which a worker is asked whether it is there."""
SHOWN_SECONDS = 3.0
"""Silence from which on it is shown."""
LEAST_PATIENCE = 10.0
"""Least silence from which on a worker hangs: a machine may be busy."""
Step = dict[str, Any]
"""Progress of one request as a worker sends it: token, log_prob, top, finish, error, routes, prompt_log_probs."""


class Mailbox:
    """Steps of the samples of one HTTP request, until they are read.

    It holds no more than the samples may become: what is not read delays nobody else.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._steps: deque[tuple[int, Step]] = deque()
        self._arrived = asyncio.Event()

    def put(self, choice: int, step: Step) -> None:
        """Add a step of a choice."""
        self._steps.append((choice, step))
        self._arrived.set()

    async def take(self) -> list[tuple[int, Step]]:
        """Wait for steps; return all that are there."""
        await self._arrived.wait()
        self._arrived.clear()
        steps = list(self._steps)
        self._steps.clear()
        return steps


@dataclass(eq=False, kw_only=True)
class SampleGroup:
    """Samples of one prompt: they go to the same worker, which feeds their prompt once.

    first     number of the first among the choices of its HTTP request
    client    whom it counts for
    numbers   of its samples at the worker, while they run
    """

    tokens: Sequence[int]
    sampling: SamplingParameters
    samples: int
    first: int
    client: str
    mailbox: Mailbox
    worker: Connection | None = None
    numbers: dict[int, int] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """Tokens that its samples may take."""
        return len(self.tokens) + self.samples * self.sampling.limit

    def end(self, why: str) -> None:
        """End all samples, which no worker has, with a sentence."""
        for sample in range(self.samples):
            self.mailbox.put(self.first + sample, {"finish": "lost", "error": why})


@dataclass(eq=False)
class Connection:
    """A worker; `lost` says why it is gone.

    answers   to what was asked, by their keys; None: it has ended
    silence   seconds since it was asked something that it did not answer, as `pulse` counts them; 0: it has answered
    """

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    running: dict[int, SampleGroup] = field(default_factory=dict)
    answers: defaultdict[str, asyncio.Queue[Any]] = field(default_factory=lambda: defaultdict(asyncio.Queue))
    lost: str = ""
    silence: float = 0.0

    def state(self, role: str, number: int, pid: int) -> WorkerState:
        """Return what `/health` shows of it."""
        silence = self.silence if not self.lost and self.silence >= SHOWN_SECONDS else 0.0
        state = "lost" if self.lost else "silent" if silence else "ready"
        return WorkerState(role=role, number=number, pid=pid, state=state, silent_seconds=silence)

    async def read(self) -> dict[str, Any] | None:
        """Wait for a frame, which ends a silence; None: the worker is gone."""
        frame = await read_frame(self.reader)
        if frame is not None:
            self.silence = 0.0
            frame.pop("pulse", None)
        return frame

    def pulse(self) -> None:
        """Ask whether it is there, once per silence; call it every PULSE_SECONDS.

        Calls are counted instead of time, so that a front that was stopped itself blames nobody.
        """
        if not self.silence:
            write_frame(self.writer, {"pulse": True})
        self.silence += PULSE_SECONDS

    def tell(self, frame: dict[str, Any]) -> None:
        """Hand over the answers in a frame."""
        for key, answer in frame.items():
            self.answers[key].put_nowait(answer)

    async def ask(self, what: str, seconds: float) -> Any:
        """Return what the worker says; None: it is gone, or does not answer in time."""
        answers = self.answers[what]
        while not answers.empty():
            answers.get_nowait()  # of a question that was given up
        if self.lost:
            return None
        write_frame(self.writer, {what: True})
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
        """Note that the worker does not come back, and tell the operator."""
        self.lost = f"{why}; stop this server and start it again"
        _log.error("%s", self.lost)


async def tell_weights(
    workers: Sequence[Connection], command: dict[str, str], seconds: float = LOADING_SECONDS
) -> list[dict[str, Any] | None]:
    """Let workers read or use weights; return their answers, None of those that end.

    seconds   that they may take; a worker that hangs is then given up, and started again
    """
    for one in workers:
        write_frame(one.writer, {"weights": command})

    async def answer(one: Connection) -> dict[str, Any] | None:
        try:
            return await asyncio.wait_for(one.answers["weights"].get(), seconds)
        except TimeoutError:
            one.writer.close()  # who reads from it takes the worker for ended
            return None

    return list(await asyncio.gather(*map(answer, workers)))


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """A worker as `/health` shows it.

    pid              of its process, or of the last one where it is gone
    state            "ready"; "silent": it does not answer; "lost": it is gone, and comes back where it can
    silent_seconds   since when it does not answer; 0: it is not silent
    """

    role: str
    number: int
    pid: int
    state: str
    silent_seconds: float


class LostRecord(NamedTuple):
    """A worker whose process has ended at a Unix time, and with it what it had recorded."""

    worker: str
    at: float


async def connection_to(worker: Worker) -> Connection:
    """Take over the control socket of a worker."""
    return Connection(worker.name, *await asyncio.open_connection(sock=worker.control))
