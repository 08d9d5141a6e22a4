"""The shape checks that pytest puts around functions, at a price that the suite can pay.

A function is checked at its first calls in a process, then at one call of several: small functions of costs and traffic
are called a hundred thousand times by one search. Checks of a nested function are built once, not at each `def`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping

_check = jaxtyping.jaxtyped
_checked: dict[object, Callable[..., Any]] = {}
_called = threading.local()
"""Per thread the nested functions whose arguments are being checked."""


ALWAYS, EVERY = 50, 20
"""So many first calls of a function are checked, and then every 20th."""


def build_once(function: Any = None, **settings: Any) -> Any:
    """Stand in for `jaxtyping.jaxtyped`, with one checker for all closures of one piece of code.

    To build a checker takes a millisecond; a planner that defines a function inside a loop builds thousands.
    """
    if function is None:
        return functools.partial(build_once, **settings)
    if not isinstance(function, FunctionType):
        return _check(function, **settings)
    if "<locals>" not in function.__qualname__:
        return _check_some(function, _check(function, **settings))
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


def _check_some(function: FunctionType, checked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `checked` at its first calls and at one of several later ones."""
    if checked is function or inspect.iscoroutinefunction(function):
        return checked
    calls = 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return (function if calls > ALWAYS and calls % EVERY else checked)(*args, **kwargs)

    return call


def _last_called(function: FunctionType) -> FunctionType:
    """Return a function with this signature, and the names that its annotations mean, which calls the last closure."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return called.stack.pop()(*args, **kwargs)

    called = _called
    stand_in = FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
    return functools.wraps(function)(stand_in)
