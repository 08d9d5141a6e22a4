"""Hooks into another trainer: check and wrap its functions, and warn once per reason to do nothing there."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

from relibra.errors import EngineError

T = TypeVar("T")
Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
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


def check_parameters(owner: ModuleType | type, name: str, parameters: Sequence[str], versions: str) -> None:
    """Raise EngineError unless a function has the parameters that this plug-in was written for.

    versions   of the trainer that the plug-in was written for
    """
    stock = getattr(owner, name, None)
    found = None if stock is None else tuple(inspect.signature(stock).parameters)
    if found != tuple(parameters):
        got = "is missing" if found is None else f"takes {found}"
        raise EngineError(
            f"{owner.__name__}.{name} {got}, and relibra was written for {tuple(parameters)}: this plug-in fits "
            f"{versions}"
        )


def noting_calls(note: Callable[[Mapping[str, Any]], T], during: ContextVar[T | None] | None = None) -> Wrapper:
    """Return a wrapper whose functions hand their arguments, by name, to `note` before they run.

    during   while the function runs, holds what `note` returned
    """

    def wrap(stock: Function) -> Function:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            call = signature.bind(*arguments, **options)
            call.apply_defaults()
            noted = note(call.arguments)
            if during is None:
                return stock(*arguments, **options)
            token = during.set(noted)
            try:
                return stock(*arguments, **options)
            finally:
                during.reset(token)

        return wrapped

    return wrap


def wrap_function(owner: ModuleType | type, name: str, wrap: Wrapper, *, also: str = "") -> bool:
    """Replace a function by what `wrap` returns for it; return False where that was done before.

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
