"""`Deadline`: the time limit of planning."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Deadline:
    """Time limit after which planning stops improving.

    seconds   from the moment this value was made; None: no limit
    missed    time was asked for and refused: the search was cut short
    """

    seconds: float | None
    missed: bool = False
    start: float = field(default_factory=time.monotonic)

    def allows(self, share: float, *, estimate: float = 0.0) -> bool:
        """Return whether work of `estimate` seconds ends before this share of the time; sets `missed` if not."""
        if self.seconds is None or self.elapsed() + estimate < share * self.seconds:
            return True
        self.missed = True
        return False

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start
