"""Independent pieces of planning on several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


def parallel_map(work: Callable[[int], T], count: int) -> list[T]:
    """Call `work(0) ... work(count - 1)` and return the results in order; kernels release the interpreter lock.

    The results do not depend on the number of threads: as many as the cores that this process may use.
    """
    workers = min(available_cores(), count)
    if workers <= 1:
        return [work(number) for number in range(count)]
    lock, numbers, result_of = Lock(), deque(range(count)), dict[int, T]()

    def take_numbers() -> None:
        try:
            while True:
                with lock:
                    if not numbers:
                        return
                    number = numbers.popleft()
                result_of[number] = work(number)
        except BaseException:  # also Ctrl-C: what is left is not begun
            with lock:
                numbers.clear()
            raise

    with ThreadPoolExecutor(workers - 1) as pool:  # this thread works too: pieces are small, and threads take time
        others = [pool.submit(take_numbers) for _ in range(workers - 1)]
        take_numbers()
        for other in others:
            other.result()
    return [result_of[number] for number in range(count)]


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
