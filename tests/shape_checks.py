"""The shape checks that pytest puts around functions: those of a nested function are built once, not at each `def`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping

_check = jaxtyping.jaxtyped
_checked: dict[object, Callable[..., Any]] = {}
_called = threading.local()
"""Per thread the nested functions whose arguments are being checked."""


def build_once(function: Any = None, **settings: Any) -> Any:
    """Stand in for `jaxtyping.jaxtyped`: check the same calls, with one checker for all closures of one piece of code.

    To build a checker takes a millisecond; a planner that defines a function inside a loop builds thousands.
    """
    if function is None:
        return functools.partial(build_once, **settings)
    if not isinstance(function, FunctionType) or "<locals>" not in function.__qualname__:
        return _check(function, **settings)
    code = (function.__module__, function.__code__)
    if code not in _checked:
        _checked[code] = _check(_last_called(function), **settings)
    checked = _checked[code]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        stack = _called.__dict__.setdefault("stack", [])
        depth = len(stack)
        stack.append(function)
        try:
            return checked(*args, **kwargs)
        finally:
            del stack[depth:]  # the arguments may have failed their check

    return call


def _last_called(function: FunctionType) -> FunctionType:
    """Return a function with this signature, and the names that its annotations mean, which calls the last closure."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return called.stack.pop()(*args, **kwargs)

    called = _called
    stand_in = FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
    return functools.wraps(function)(stand_in)
