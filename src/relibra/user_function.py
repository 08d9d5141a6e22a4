"""Check (without running its module) or import a user's function, which a setting names as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from relibra.errors import ConfigError, RelibraError
from relibra.printable import excerpt


def check_function(setting: str, name: str, *, known: str = "") -> None:
    """Raise ConfigError where the module is missing or does not compile; the module is not run.

    known   other allowed values, for the message
    """
    module_name, _ = _module_and_function(setting, name, known)
    where = f"{setting} is {name!r}"
    if "." in module_name:  # finding it would run its package
        return
    try:
        spec = importlib.util.find_spec(module_name)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader.get_code(module_name)  # compiles it
    except (ImportError, SyntaxError, ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{where}: reading {module_name!r} raised {whole_message(error)}") from error
    if spec is None:
        raise ConfigError(f"{where}: there is no module {module_name!r} in {Path.cwd()} and where Python finds modules")


def import_function(setting: str, name: str, *, known: str = "", arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """Import a function; installed modules come before those in the current folder.

    known       other allowed values, for the message
    arguments   names of the positional arguments of a call; (): not checked here
    raises      ConfigError if there is no such module or function, or if it is asynchronous or takes other arguments
    """
    module_name, function_name = _module_and_function(setting, name, known)
    where = f"{setting} is {name!r}"
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigError(
            f"{where}: importing {module_name!r} raised {whole_message(error)}; looked in {Path.cwd()} and where "
            "Python finds modules"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        got = "has no such function" if function is None else f"has {excerpt(function)} there, which cannot be called"
        raise ConfigError(f"{where}: {getattr(module, '__file__', None) or module_name} {got}; check the name")
    if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
        raise ConfigError(
            f"{where}: it is an async function, which nobody awaits; make it a plain one (asyncio.run inside)"
        )
    try:
        if arguments:
            inspect.signature(function).bind(*arguments)
    except TypeError as error:
        called = f"{function_name}({', '.join(arguments)})"
        raise ConfigError(f"{where}: it is called as {called}, which it does not take: {error}") from error
    except ValueError:  # one written in C has no signature
        pass
    return function


@contextmanager
def user_errors(what: str, error: type[RelibraError]) -> Iterator[None]:
    """Raise what a user's function raises as an error of relibra, in one sentence that begins with `what`."""
    try:
        yield
    except RelibraError as failure:
        raise type(failure)(f"{what}: {failure}") from failure
    except Exception as failure:
        raise error(f"{what} raised {whole_message(failure)}") from failure


def _module_and_function(setting: str, name: str, known: str) -> tuple[str, str]:
    """Return the two names, and let Python find modules in the current folder too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function) or module.endswith(".py") or "/" in module:
        raise ConfigError(
            f"{setting} is {name!r}: allowed are {known and f'{known}, or '}a function of yours as 'module:function'"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return module, function


def whole_message(error: BaseException) -> str:
    """Return the type and the message of an error, without line breaks."""
    try:
        text = " ".join(str(error).split())
    except Exception as other:  # noqa: BLE001 - of the user's class
        text = f"its message cannot be read ({type(other).__name__})"
    return f"{type(error).__name__}: {text}"
