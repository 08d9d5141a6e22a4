"""`Ledger`: every storage of a device that a run makes and frees, in order; and the peaks of its phases.

Who owns a storage is often known only later, as of a gradient in the middle of a backward pass: events are recorded
first, and parts are summed when all owners are known.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from relibra.rl.memory.estimate import Peaks
from relibra.rl.model.local_shards import local_shard

BLOCK = 512
"""Bytes to which the caching allocator of a GPU rounds up."""


class Ledger:
    """Storages of one device.

    now     bytes of the storages that are alive
    place   part of the model that runs, if peaks there are told apart; else ""
    """

    def __init__(self) -> None:
        """Begin without storages."""
        self.now, self.place = 0, ""
        self._live: dict[int, list[Any]] = {}  # by address of the storage: number, bytes, weak reference
        self._events: list[tuple[int, int]] = []  # number of a storage, change in bytes
        self._lines: list[tuple[str, ...]] = []  # of each storage, by number: what made it, and with the place
        self._parts: list[str] = []
        self._phases: list[tuple[int, str]] = []  # first event of each

    def begin(self, phase: str) -> None:
        """Count what follows to a phase, which may begin several times."""
        self._phases.append((len(self._events), phase))

    def see(self, tensor: Tensor, part: str, line: str, *, power_of_two: bool = False) -> None:
        """Count the storage of a tensor with its present size.

        part           of a storage that is new, until `own` names another
        power_of_two   round its bytes up to one, as the allocator of page-locked memory does
        """
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is None or known[2]() is not storage:
            number = len(self._lines)
            self._lines.append((line, f"{line} in {self.place}") if self.place else (line,))
            self._parts.append(part)
            gone = weakref.ref(storage, partial(self._gone, storage._cdata))
            known = self._live[storage._cdata] = [number, 0, gone]
        nbytes = storage.nbytes()
        self._set(known, 1 << (nbytes - 1).bit_length() if power_of_two and nbytes else rounded(nbytes))

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is counted."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return known is not None and known[2]() is tensor.untyped_storage()

    def resized(self, storage: Any) -> None:
        """Count a storage, if it is known, with its present size: FSDP frees gathered weights so."""
        known = self._live.get(storage._cdata)
        if known is not None and known[2]() is storage:
            self._set(known, rounded(storage.nbytes()))

    def own(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Count the storages of tensors to a part, from their beginning to their end."""
        for tensor in tensors:
            if tensor is None:
                continue
            known = self._live.get(local_shard(tensor).untyped_storage()._cdata)
            if known is not None:
                self._parts[known[0]] = part

    def peaks(self) -> Peaks:
        """Return bytes by phase, line (or line in a place) and part: the largest sum after the line made a storage."""
        found: Peaks = {}
        total, now = 0, Counter[str]()
        phases = [*self._phases, (len(self._events), "")]
        for (start, phase), (end, _) in pairwise(phases):
            lines = found.setdefault(phase, {})
            if total >= sum(lines.get("", {}).values()):
                lines[""] = dict(now)  # what the phase begins with
            for number, change in self._events[start:end]:
                total += change
                now[self._parts[number]] += change
                for line in self._lines[number] if change > 0 else ():
                    if total > sum(lines.get(line, {}).values()):
                        lines[line] = {part: nbytes for part, nbytes in now.items() if nbytes}
        return found

    def _set(self, known: list[Any], nbytes: int) -> None:
        number, before, _ = known
        if nbytes != before:
            known[1] = nbytes
            self.now += nbytes - before
            self._events.append((number, nbytes - before))

    def _gone(self, key: int, reference: object) -> None:
        known = self._live.get(key)
        if known is not None and known[2] is reference:
            del self._live[key]
            self.now -= known[1]
            self._events.append((known[0], -known[1]))


def rounded(nbytes: int) -> int:
    """Return bytes as the allocator of a GPU gives them out."""
    return -(-nbytes // BLOCK) * BLOCK
