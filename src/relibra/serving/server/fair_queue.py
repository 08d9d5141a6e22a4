"""`FairQueue`: who is served next, so that a client with many requests does not delay one with few."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of several clients; each client gets an equal share of the cost that is served.

    Start-time fair queueing (Goyal, Vin, Cheng 1996): an item begins, in virtual time, when the one before it of the
    same client ends, or now; the item that begins first is served, ties in the order of arrival. An idle client saves
    up nothing.

    >>> queue = FairQueue()
    >>> for client, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4)]:
    ...     queue.push(client, 10, item)
    >>> [queue.pop() for _ in range(4)]
    [1, 4, 2, 3]
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._heap: list[tuple[int, int, Item]] = []
        self._arrivals = itertools.count()
        self._ends: dict[str, int] = {}
        self._now = 0

    def push(self, client: str, cost: int, item: Item) -> None:
        """Queue an item."""
        start = max(self._now, self._ends.get(client, 0))
        self._ends[client] = start + cost
        heapq.heappush(self._heap, (start, next(self._arrivals), item))

    def pop(self) -> Item:
        """Take the next item out; the queue is not empty."""
        self._now, _, item = heapq.heappop(self._heap)
        if not self._heap:
            self._ends.clear()
            self._now = 0
        return item

    def remove(self, item: Item) -> None:
        """Take an item out, wherever it is; its client has paid for it."""
        self._heap = [entry for entry in self._heap if entry[2] is not item]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, item: object) -> bool:
        return any(entry[2] is item for entry in self._heap)


def retry_seconds(waiting: int, ended: Sequence[float], *, most: int = 60) -> int:
    """Return the whole seconds after which a client that is refused may try again: those that the queue takes.

    waiting   requests in the queue
    ended     times at which the latest requests ended, ascending

    >>> retry_seconds(100, [0.0, 1.0, 2.0])
    60
    >>> retry_seconds(3, [0.0, 1.0, 2.0])
    3
    """
    if len(ended) < 2 or ended[-1] <= ended[0]:
        return 1
    rate = (len(ended) - 1) / (ended[-1] - ended[0])
    return max(1, min(most, round(waiting / rate)))
