"""`ComputeToken`: the right to compute, which the micro-batches of a worker hand on in the order in which they ask."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class ComputeToken:
    """A lock that is handed to whoever has waited longest, and counts the seconds for which it was held.

    While one micro-batch waits for experts, another computes attention. Answers arrive in the order of the requests, so
    the order of (layer, micro-batch) stays the same from layer to layer.
    """

    def __init__(self) -> None:
        """Begin free."""
        self._turn = threading.Condition()
        self._asked = self._served = 0
        self._since = self.busy_seconds = 0.0

    def acquire(self) -> None:
        """Wait for the token."""
        with self._turn:
            ticket = self._asked
            self._asked += 1
            self._turn.wait_for(lambda: self._served == ticket)
            self._since = time.perf_counter()

    def release(self) -> None:
        """Hand the token to the one that has waited longest."""
        with self._turn:
            self.busy_seconds += time.perf_counter() - self._since
            self._served += 1
            self._turn.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()
