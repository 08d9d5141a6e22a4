"""`ComputeToken`: the right to compute, which the micro-batches of a worker hand on in the order in which they ask."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType


class ComputeToken:
    """A lock that is handed to whoever has waited longest, and counts the seconds for which it was held.

    While one micro-batch waits for experts, another computes attention. Answers arrive in the order of the requests, so
    the order of (layer, micro-batch) stays the same from layer to layer.
    """

    def __init__(self) -> None:
        """Begin free."""
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False
        self._since = 0.0
        self.busy_seconds = 0.0

    def acquire(self) -> None:
        """Wait for the token."""
        with self._mutex:
            if not self._held:
                self._held, self._since = True, time.perf_counter()
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def release(self) -> None:
        """Hand the token to the one that has waited longest."""
        with self._mutex:
            now = time.perf_counter()
            self.busy_seconds += now - self._since
            self._since = now
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()
