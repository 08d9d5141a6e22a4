"""Hooks into another trainer: its functions, checked and wrapped, and reasons why they are used as they are."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from relibra.errors import EngineError

_NUMBER = re.compile(r"\d[\d,.]*")


class WarnOnce:
    """Logs a warning unless the same was logged before, whatever numbers are in it.

    Reasons name samples and sizes, which change from step to step.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        """Log with `log`; `what` stands before each reason."""
        self._log, self._what = log, what
        self._logged: set[str] = set()

    def warn(self, reason: str) -> None:
        """Log a reason, the first time."""
        kind = _NUMBER.sub("#", reason)
        if kind not in self._logged:
            self._logged.add(kind)
            self._log.warning("relibra: %s: %s", self._what, reason)

    def forget(self) -> None:
        """Log reasons again that were logged before."""
        self._logged.clear()


def check_parameters(owner: ModuleType | type, name: str, parameters: Sequence[str], versions: str) -> None:
    """Raise EngineError unless a function has the parameters that this plug-in was written for.

    versions   of the trainer that it was written for
    """
    stock = getattr(owner, name, None)
    found = None if stock is None else tuple(inspect.signature(stock).parameters)
    if found != tuple(parameters):
        got = "is missing" if found is None else f"takes {found}"
        raise EngineError(
            f"{owner.__name__}.{name} {got}, and relibra was written for {tuple(parameters)}: this plug-in fits "
            f"{versions}"
        )


def wrap_function(
    owner: ModuleType | type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, also: str = ""
) -> bool:
    """Replace a function by what `wrap` returns for it, and return whether that was still to be done.

    also   module that has imported it by name: replaced there too, where the module is loaded already
    """
    stock = getattr(owner, name)
    if hasattr(stock, "relibra_stock"):
        return False
    wrapped = wrap(stock)
    wrapped.relibra_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    if also in sys.modules and getattr(sys.modules[also], name, None) is stock:
        setattr(sys.modules[also], name, wrapped)
    return True
