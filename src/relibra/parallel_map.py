"""Independent pieces of work on the threads of this process: kernels of planning and packing."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
_WORTH_THREADS = 0.002
"""Least seconds of work to share: waking threads takes longer than small kernels."""


def parallel_map(work: Callable[[int], T], count: int) -> list[T]:
    """Call `work(0) ... work(count - 1)` and return the results in order; kernels release the interpreter lock.

    The results do not depend on the number of threads: as many as the cores that this process may use.
    """
    start = time.perf_counter()
    first = [work(number) for number in range(min(1, count))]
    left_seconds = (count - 1) * (time.perf_counter() - start)
    workers = min(available_cores(), count - 1)
    if workers <= 1 or left_seconds < _WORTH_THREADS:
        return first + [work(number) for number in range(1, count)]
    lock, numbers, result_of = Lock(), deque(range(1, count)), dict(enumerate(first))

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

    # This thread works too. Helpers that have not started when all numbers are taken are cancelled: else a
    # `work` that calls this function could wait for helpers that are queued behind itself.
    others = [work_threads().submit(take_numbers) for _ in range(workers - 1)]
    try:
        take_numbers()
    finally:
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()
    return [result_of[number] for number in range(count)]


@cache
def work_threads() -> ThreadPoolExecutor:
    """Return the pool of this process: starting threads for each call takes as long as a small step of planning."""
    return ThreadPoolExecutor(max(1, available_cores() - 1), thread_name_prefix="relibra-work")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=work_threads.cache_clear)  # threads do not survive a fork


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
