"""Independent pieces of planning on several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def parallel_map(work: Callable[[int], T], count: int, threads: int | None) -> list[T]:
    """Call `work(0) ... work(count - 1)` and return the results in order; kernels release the interpreter lock.

    threads   None: as many as this process may use. The results do not depend on it
    """
    workers = min(threads or available_cores(), count)
    if workers <= 1:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(count)))


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
