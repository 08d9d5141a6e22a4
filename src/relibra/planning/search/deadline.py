"""When planning has to stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


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
