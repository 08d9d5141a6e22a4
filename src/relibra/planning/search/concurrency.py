"""Pieces of planning done side by side, and a clock that knows how much planning time is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


def side_by_side(work: Callable[[int], T], count: int, threads: int | None) -> list[T]:
    """Call `work(0) ... work(count - 1)` and return the results in order; kernels release the interpreter lock.

    threads   None: as many as this process may use. The results do not depend on it
    """
    workers = min(threads or available_cores(), count)
    if workers <= 1:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(count)))


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Deadline:
    """When planning has to stop improving; without a limit there is always time.

    seconds   from the moment this value was made; None: no limit
    missed    somebody asked for time and there was none: the search was cut short
    """

    seconds: float | None
    missed: bool = False
    start: float = field(default_factory=time.monotonic)

    def allows(self, share: float, *, estimate: float = 0.0) -> bool:
        """Tell whether work of so many estimated seconds ends before this share of the time is spent."""
        if self.seconds is None or self.elapsed() + estimate < share * self.seconds:
            return True
        self.missed = True
        return False

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start
