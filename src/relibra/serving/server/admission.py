"""`Admission`: which choices wait, which go to the workers next, and when no more are taken."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from fastapi import HTTPException

from relibra.engine.sequence import FinishReason
from relibra.serving.server.choice import Choice
from relibra.serving.server.metrics import ServerMetrics
from relibra.serving.server.workers import WorkerClients

SOON = {"Retry-After": "1"}


class Admission:
    """The queue before the workers: first come, first served, bounded, and held while weights are loaded."""

    def __init__(
        self,
        clients: WorkerClients,
        metrics: ServerMetrics,
        *,
        most_waiting: int,
        most_open: int,
        at_worker: int,
        deadline: float,
    ) -> None:
        """Begin with an empty queue.

        most_waiting   choices in the queue
        most_open      choices in all: in the queue, at the workers, and of clients that read slowly
        at_worker      most choices at one worker: those that it decodes, and some that begin when others end
        deadline       seconds that a request may take
        """
        self.clients, self._metrics = clients, metrics
        self._most_waiting, self._most_open, self._at_worker = most_waiting, most_open, at_worker
        self._deadline = deadline
        self.queue: deque[Choice] = deque()
        self._open, self._held, self._paused, self._stopping = 0, False, False, ""
        clients.on_free = self._send

    async def run(self, choices: Sequence[Choice]) -> AsyncGenerator[list[Choice], None]:
        """Yield the choices that grew, until all have ended; closing the generator cancels those that have not.

        raises   HTTPException: 400 where they never fit the queue, 429 where they do not now, 503 where workers are
                 lost, the time is over, or the server stops
        """
        self._check(len(choices))
        self._metrics.count_prompts([choice.prompt for choice in choices if choice.sampling.sample == 0])
        self._open += len(choices)
        self.queue.extend(choices)
        until = asyncio.get_running_loop().time() + self._deadline
        try:
            self._send()
            while any(choice.finish is None for choice in choices):
                await self._wait(choices[0].arrived, until)
                grown = []
                for choice in choices:
                    before = choice.num_tokens
                    if choice.read():
                        self._metrics.count(choice, before)
                        grown.append(choice)
                        if choice.finish is not None:
                            self.clients.cancel(choice)
                        await asyncio.sleep(0)  # other requests have their turn between the choices of this one
                yield grown
        finally:
            self._open -= len(choices)
            for choice in choices:
                if choice.number is None and choice in self.queue:
                    self.queue.remove(choice)
                self.clients.cancel(choice)

    async def _wait(self, arrived: asyncio.Event, until: float) -> None:
        """Wait for progress; raises HTTPException (503) when the time of a request is over."""
        try:
            async with asyncio.timeout_at(until):
                await arrived.wait()
        except TimeoutError as error:
            raise HTTPException(
                503,
                f"the answer did not end within {self._deadline:g} s (--deadline): send fewer requests at once, "
                "or ask for fewer tokens",
                SOON,
            ) from error
        arrived.clear()

    def _check(self, samples: int) -> None:
        """Raise HTTPException where `samples` more choices cannot be taken."""
        if why := self._stopping or self.clients.failure:
            raise HTTPException(503, why)
        if samples > self._most_waiting:
            raise HTTPException(
                400,
                f"this request asks for {samples} answers, and the queue of this server holds {self._most_waiting}: "
                "ask for fewer at once, or start relibra serve with a larger --max-waiting",
            )
        if len(self.queue) + samples > self._most_waiting or self._open + samples > self._most_open:
            raise HTTPException(
                429,
                f"the server is busy: its queue has {len(self.queue)} of {self._most_waiting} answers, and it has "
                f"{self._open} of {self._most_open} in all; this request adds {samples}: send it again later, or start "
                "relibra serve with a larger --max-waiting",
                SOON,
            )

    def hold(self, held: bool) -> None:
        """Keep choices in the queue, or let them go on."""
        self._held = held
        self._send()

    def pause(self) -> None:
        """End all answers with the tokens that they have, and keep new choices in the queue until `resume`."""
        self._paused = True
        self._end_all("abort")

    def resume(self) -> None:
        """Let choices go on to the workers."""
        self._paused = False
        self._send()

    def stop(self) -> None:
        """End all answers, waiting or under way, with an error sentence, and take no more."""
        self._stopping = "the server is being stopped: send the request again when it is back"
        self._end_all("lost", self._stopping)

    def _end_all(self, finish: FinishReason, error: str = "") -> None:
        while self.queue:
            self.queue.popleft().end(finish, error)
        self.clients.end_answers(finish, error)

    def _send(self) -> None:
        while self.queue and not (self._held or self._paused) and self.clients.has_room(self._at_worker):
            self.clients.begin(self.queue.popleft(), self._at_worker)
