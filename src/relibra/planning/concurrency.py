"""Pieces of planning done side by side, and a clock that knows how much planning time is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from typing import TypeVar

T = TypeVar("T")


def side_by_side(work: Callable[[int], T], count: int, threads: int | None) -> list[T]:
    """Call `work(0) ... work(count - 1)` and return the results in order; kernels release the interpreter lock.

    threads   None: as many as there are cores. The results do not depend on it
    """
    workers = min(threads or cpu_count() or 1, count)
    if workers <= 1:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(count)))


@dataclass(frozen=True)
class Deadline:
    """When planning has to stop improving; without a limit there is always time.

    seconds   from the moment this value was made; None: no limit
    """

    seconds: float | None
    start: float = field(default_factory=time.monotonic)

    def allows(self, share: float) -> bool:
        """Tell whether less than this share of the time is spent."""
        return self.seconds is None or time.monotonic() - self.start < share * self.seconds
