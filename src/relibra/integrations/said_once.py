"""`SaidOnce`: reasons why a trainer's own schedule is used, logged once each."""

from __future__ import annotations

import logging
import re

_NUMBER = re.compile(r"\d[\d,.]*")


class SaidOnce:
    """Logs a warning unless the same was logged before, whatever numbers are in it.

    Reasons name samples and sizes, which change from step to step.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        """Log with `log`; `what` stands before each reason."""
        self._log, self._what = log, what
        self._said: set[str] = set()

    def say(self, reason: str) -> None:
        """Log a reason, the first time."""
        kind = _NUMBER.sub("#", reason)
        if kind not in self._said:
            self._said.add(kind)
            self._log.warning("relibra: %s: %s", self._what, reason)

    def forget(self) -> None:
        """Log reasons again that were logged before."""
        self._said.clear()
