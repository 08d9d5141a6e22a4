"""`Admission`: which samples wait, which go to the workers next, and when no more are taken."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from relibra.serving.server.clients import SampleGroup, WorkerClients
from relibra.serving.server.fair_queue import FairQueue, retry_seconds
from relibra.serving.server.refusals import Overloaded, Unavailable

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
        self.held = False
        clients.on_free = self._free

    def check(self, samples: int) -> None:
        """Raise Overloaded where so many more samples are too many, Unavailable where nobody is left to run them."""
        if self.clients.failure:
            raise Unavailable(self.clients.failure)
        limits = self.limits
        if self.waiting + samples > limits.waiting or self.open + samples > limits.answers:
            after = retry_seconds(self.waiting + samples, list(self._ended))
            raise Overloaded(
                f"{self.waiting} answers wait and {self.open - self.waiting} are under way: this server takes "
                f"{limits.waiting} and {limits.answers - limits.waiting}; send the request again in {after} s",
                retry_after=after,
            )

    def submit(self, group: SampleGroup) -> None:
        """Queue a group that `check` has let in; `release` it at the end."""
        self.waiting += group.samples
        self.open += group.samples
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

    def _free(self) -> None:
        self._ended.append(time.monotonic())
        self._send()

    def _send(self) -> None:
        while self._queue and not self.held and self.clients.has_room(self.limits.at_worker):
            group = self._queue.pop()
            self.waiting -= group.samples
            self.clients.begin(group)
