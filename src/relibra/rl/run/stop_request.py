"""Ctrl-C during training: all ranks stop together after a whole step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from relibra.rl.run.ranks import largest_over_ranks


class StopRequest:
    """Records SIGINT of this process, for the rest of its life."""

    def __init__(self) -> None:
        """Install the signal handler; a SIGINT that was blocked since the process started is delivered now."""
        self._requested = False
        self.on_request: Callable[[], None] = lambda: None
        signal.signal(signal.SIGINT, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def on_any_rank(self) -> bool:
        """Return whether any rank received SIGINT; collective."""
        return largest_over_ranks(int(self._requested)) > 0

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        self._requested = True
        self.on_request()
