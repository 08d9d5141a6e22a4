"""Rewards for prompts of your own: "exact", "maths", or a function of yours."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from relibra.errors import ConfigError, RelibraError
from relibra.printable import excerpt
from relibra.rl.tasks.maths import MathsJudge
from relibra.rl.tasks.rows import column
from relibra.rl.tasks.task import Prompt, RewardError

NEEDS_ANSWER = ("exact", "maths")
"""Rewards that compare with the correct answer of the row."""

LARGEST = 1e9
"""Largest absolute reward: larger ones dominate all others in sums of squares."""

_MAKE_NAMES = {"*", "__getattr__", "__dict__", "__name__", "modules", "globals", "locals", "vars", "setattr", "exec"}
"""Words in a module that may get functions which its text does not name: `from x import *`, `sys.modules[__name__]`."""

RewardFunction = Callable[[str, Mapping[str, Any]], Any]
"""A user's function: (response, row of the prompt) -> number."""


@dataclass(frozen=True, eq=False)
class Reward:
    """A reward function with its configured name, for error messages."""

    name: str
    function: RewardFunction

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Return the reward of a response.

        raises    RewardError naming function and row, if the function raises or returns no number in range
        """
        where = f"task.reward {self.name!r} at {prompt.origin or 'a prompt'}, response {excerpt(response)}"
        try:
            value = self.function(response, prompt.row)
            number = _number(value)
        except RelibraError as error:
            raise type(error)(f"{where}: {error}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any error of the user's code is reported, also asyncio.CancelledError
            raise RewardError(
                f"{where}: raised {_in_a_line(error)}; a reward returns a number for every response"
            ) from error
        if number is None:
            raise RewardError(
                f"{where}: returned {excerpt(value)}; a reward is a number from -{LARGEST:g} to "
                f"{LARGEST:g}, or True or False"
            )
        return number


def make_reward(name: str, answer_column: str) -> Reward:
    """Return the reward that task.reward names.

    name             "exact", "maths" or `module:function`
    answer_column    column of the correct answer
    raises           ConfigError if there is no such reward, module or function, or a library is missing
    """
    if name == "exact":
        return Reward(name, lambda response, row: same_text(response, right_answer(row, answer_column)))
    if name == "maths":
        judge = MathsJudge()
        return Reward(name, lambda response, row: judge(response, right_answer(row, answer_column)))
    return Reward(name, _imported(*_module_and_function(name)))


def check_reward(name: str) -> None:
    """Raise ConfigError for most of what `make_reward` refuses, without running a module of the user.

    The module has to be found and to compile, and its text has to name the function, or may make one of any name.
    """
    if name in NEEDS_ANSWER:
        make_reward(name, "")
        return
    module_name, function_name = _module_and_function(name)
    where = f"task.reward is {name!r}"
    _look_in_current_folder()
    if "." in module_name:  # finding it would run its package
        return
    try:
        spec = importlib.util.find_spec(module_name)
        if spec is None:
            raise ConfigError(
                f"{where}: there is no module {module_name!r} in {Path.cwd()} and where Python finds modules"
            )
        if not isinstance(spec.loader, SourceFileLoader):
            return
        code = spec.loader.get_code(module_name)
    except (ImportError, SyntaxError, ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{where}: reading {module_name!r} raised {_in_a_line(error)}") from error
    if code is None:
        return
    if not _words(code) & {function_name, *_MAKE_NAMES}:
        raise ConfigError(f"{where}: {spec.origin} has no such function; check the name")


def _words(code: CodeType) -> set[str]:
    """Return the names and texts in a module's code, and in that of its functions and classes."""
    words = set(code.co_names)
    if "__qualname__" in words:  # a class, whose code begins with its module's __name__
        words.discard("__name__")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            words |= _words(constant)
        else:  # a tuple: names of arguments, or of what is imported
            words.update(
                one for one in (constant if isinstance(constant, tuple) else [constant]) if isinstance(one, str)
            )
    return words


def _module_and_function(name: str) -> tuple[str, str]:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(
            f"task.reward is {name!r}: allowed are 'exact', 'maths', or a function of yours as 'module:function'"
        )
    return module, function


def _look_in_current_folder() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def same_text(response: str, answer: str) -> bool:
    r"""Return whether two texts are equal up to the amount of white space.

    >>> same_text(" forty \n two", "forty two"), same_text("forty-two", "forty two")
    (True, False)
    """
    return response.split() == answer.split()


def right_answer(row: Mapping[str, Any], name: str, origin: str = "its row") -> str:
    """Return the correct answer of a row as text.

    origin    file and line, for error messages
    raises    ConfigError if the column is missing or has neither text nor number
    """
    answer = column(row, name, origin=origin, remedy="set task.answer_column, or a task.reward that needs none")
    if isinstance(answer, str | int | float) and not isinstance(answer, bool) and str(answer).strip():
        return str(answer)
    raise ConfigError(f"{origin}: column {name!r} is {excerpt(answer)}; a right answer is a text or number, not empty")


def _imported(module_name: str, function_name: str) -> RewardFunction:
    """Import a user's function; installed modules come before those in the current folder."""
    where = f"task.reward is '{module_name}:{function_name}'"
    _look_in_current_folder()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigError(
            f"{where}: importing {module_name!r} raised {_in_a_line(error)}; looked in {Path.cwd()} and where Python "
            "finds modules"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        got = "has no such function" if function is None else f"has {excerpt(function)} there, which cannot be called"
        raise ConfigError(f"{where}: {getattr(module, '__file__', None) or module_name} {got}; check the name")
    imported: RewardFunction = function
    return imported


def _number(value: object) -> float | None:
    """Return a value as a float; None if it is no finite number of at most `LARGEST`."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):  # an array or tensor of one number
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real | np.bool_):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def _in_a_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception as other:  # noqa: BLE001 - of the user's class
        text = f"its message cannot be read ({type(other).__name__})"
    return f"{type(error).__name__}: {text}"
