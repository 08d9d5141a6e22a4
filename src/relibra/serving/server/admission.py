"""`Admission`: which samples wait, which go to the workers next, and when no more are taken."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from relibra.serving.server.fair_queue import FairQueue, retry_seconds
from relibra.serving.server.refusals import BadRequest, Overloaded, Unavailable
from relibra.serving.server.workers.clients import WorkerClients
from relibra.serving.server.workers.connection import SampleGroup

_ENDED = 256
"""Latest ends of samples that the rate is counted from."""


@dataclass(frozen=True, kw_only=True)
class FrontLimits:
    """Limits of a front.

    at_worker   samples that are sent to one worker at once: those that it decodes, and some that take their places
    waiting     most samples in the queue
    answers     most samples in all: in the queue, at the workers, and told to clients that read slowly
    deadline    seconds that a request may take
    """

    at_worker: int
    waiting: int
    answers: int
    deadline: float


class Admission:
    """The queue in front of the workers: fair among clients, bounded, and held while weights are loaded."""

    def __init__(self, clients: WorkerClients, limits: FrontLimits) -> None:
        """Begin with an empty queue."""
        self.clients, self.limits = clients, limits
        self._queue: FairQueue[SampleGroup] = FairQueue()
        self._ended: deque[float] = deque(maxlen=_ENDED)
        self.waiting = self.open = 0
        self.held, self._stopping = False, ""
        clients.on_free = self._free

    def check(self, samples: int) -> None:
        """Refuse so many more samples where they cannot be taken.

        raises   BadRequest where they never fit the queue, Overloaded where they do not now, Unavailable where nobody
                 is left to run them, or the server stops
        """
        if why := self._stopping or self.clients.failure:
            raise Unavailable(why)
        limits = self.limits
        if samples > limits.waiting:
            raise BadRequest(
                f"this request asks for {samples} answers, and the queue of this server holds {limits.waiting}: ask "
                "for fewer at once, or start relibra serve with a larger --max-waiting"
            )
        if self.waiting + samples <= limits.waiting and self.open + samples <= limits.answers:
            return
        if self.waiting + samples > limits.waiting:
            full = f"its queue has {self.waiting} of {limits.waiting} answers"
        else:
            full = f"it has {self.open} of {limits.answers} answers, waiting, under way or not read yet"
        after = retry_seconds(self.waiting + samples, list(self._ended))
        raise Overloaded(
            f"the server is busy: {full}, and this request adds {samples}; send it again in {after} s, or start "
            "relibra serve with a larger --max-waiting",
            retry_after=after,
        )

    def submit(self, group: SampleGroup) -> None:
        """Queue a group that `check` has let in; `release` it at the end."""
        self.open += group.samples
        if self._stopping:  # since it was let in
            group.end(self._stopping)
            return
        self.waiting += group.samples
        self._queue.push(group.client, group.cost, group)
        self._send()

    def release(self, group: SampleGroup) -> None:
        """End a group, wherever it is."""
        self.open -= group.samples
        if group.worker is None and group in self._queue:
            self._queue.remove(group)
            self.waiting -= group.samples
        self.clients.cancel(group)

    def hold(self, held: bool) -> None:
        """Keep samples in the queue, or let them go on."""
        self.held = held
        self._send()

    def stop(self) -> None:
        """End all answers with a sentence, waiting or under way, and take no more."""
        self._stopping = "the server is being stopped: send the request again when it is back"
        while self._queue:
            group = self._queue.pop()
            self.waiting -= group.samples
            group.end(self._stopping)
        self.clients.end_answers(self._stopping)

    def _free(self) -> None:
        self._ended.append(time.monotonic())
        self._send()

    def _send(self) -> None:
        while self._queue and not self.held and self.clients.has_room(self.limits.at_worker):
            group = self._queue.pop()
            self.waiting -= group.samples
            self.clients.begin(group)
