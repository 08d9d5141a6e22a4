"""Rewards for prompts of your own: "exact", "maths", or a function of yours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from numbers import Real
from typing import Any

import numpy as np

from relibra.errors import ConfigError, RelibraError
from relibra.printable import excerpt
from relibra.rl.tasks.maths import MathsJudge
from relibra.rl.tasks.rows import column
from relibra.rl.tasks.task import Prompt, RewardError
from relibra.user_function import check_function, import_function, whole_message

NEEDS_ANSWER = ("exact", "maths")
"""Rewards that compare with the correct answer of the row."""
_KNOWN = "'exact', 'maths'"

LARGEST = 1e9
"""Largest absolute reward: larger ones dominate all others in sums of squares."""

MOST_PLACES = 1000
"""Most digits of a right answer before its point, and about as many zeros between the point and other digits."""
_ONE_AT_A_TIME = threading.Lock()
"""Reward functions get one call at a time: with `rollout.ahead` an evaluation and a thread both compute rewards."""


@dataclass(frozen=True, eq=False)
class Reward:
    """A reward function, (response, row of the prompt) -> number, with its configured name, for error messages."""

    name: str
    function: Callable[[str, Mapping[str, Any]], Any]

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Return the reward of a response.

        raises    RewardError naming function and row, if the function raises or returns no number in range
        """
        where = f"task.reward {self.name!r} at {prompt.origin or 'a prompt'}, response {excerpt(response)}"
        try:
            with _ONE_AT_A_TIME:
                value = self.function(response, prompt.row)
                number = _number(value)
        except RelibraError as error:
            raise type(error)(f"{where}: {error}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any error of the user's code is reported, also asyncio.CancelledError
            raise RewardError(
                f"{where}: raised {whole_message(error)}; a reward returns a number for every response"
            ) from error
        if number is None:
            raise RewardError(
                f"{where}: returned {excerpt(value)}; a reward is a number from -{LARGEST:g} to "
                f"{LARGEST:g}, or True or False, of one response: it is called as (response, row)"
            )
        return number


def make_reward(name: str, answer_column: str) -> Reward:
    """Return the reward that task.reward names.

    name             "exact", "maths" or `module:function`
    answer_column    column of the correct answer
    raises           ConfigError if there is no such reward, module or function, or a library is missing

    >>> make_reward("exact", "answer")(Prompt(text="six times seven", row={"answer": "forty two"}), " forty  two")
    1.0
    """
    if name == "exact":
        return Reward(name, lambda response, row: _is_answer(response, row, answer_column))
    if name == "maths":
        judge = MathsJudge()
        return Reward(name, lambda response, row: judge(response, right_answer(row, answer_column)))
    function = import_function("task.reward", name, known=_KNOWN, arguments=("response", "row"))
    return Reward(name, function)


def check_reward(name: str) -> None:
    """Raise ConfigError for most of what `make_reward` refuses, without running a module of the user."""
    if name in NEEDS_ANSWER:
        make_reward(name, "")
    else:
        check_function("task.reward", name, known=_KNOWN)


def _is_answer(response: str, row: Mapping[str, Any], answer_column: str) -> bool:
    """Return whether a response has the words of the right answer or, where that is no text, its value as a number."""
    answer = right_answer(row, answer_column)
    if response.split() == answer.split():
        return True
    if isinstance(row[answer_column], str):
        return False
    try:
        return Decimal(response.strip()) == Decimal(answer)
    except InvalidOperation:
        return False


def right_answer(row: Mapping[str, Any], name: str, origin: str = "its row") -> str:
    """Return the correct answer of a row as text; a number has the file's digits, no exponent, no fraction of zeros.

    origin    file and line, for error messages
    raises    ConfigError if the column is missing or has neither text nor number
    """
    answer = column(row, name, origin=origin, remedy="set task.answer_column, or a task.reward that needs none")
    if isinstance(answer, str) and answer.strip():
        return answer
    if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool):
        try:
            number = Decimal(str(getattr(answer, "written", answer)))
        except InvalidOperation:  # its exponent is beyond any
            number = Decimal("NaN")
        if number.is_finite() and abs(number.adjusted()) < MOST_PLACES:
            whole, _, places = f"{number:f}".partition(".")
            return f"{whole}.{places}" if places.strip("0") else whole
    raise ConfigError(
        f"{origin}: column {name!r} is {excerpt(answer)}; a right answer is a text or number, not empty, and finite"
    )


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
