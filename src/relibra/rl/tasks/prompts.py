"""The task of your own file: its rows in a new random order in each epoch, with a reward of your choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import ConfigError
from relibra.printable import excerpt
from relibra.rl.config.settings import TaskSettings
from relibra.rl.tasks.rewards import NEEDS_ANSWER, Reward, make_reward, right_answer
from relibra.rl.tasks.rows import Rows, column, open_rows
from relibra.rl.tasks.task import TRAINING_STREAM, Prompt, Task

TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""Columns of a row that go to the chat template."""
_ROWS = "task_rows"
_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{.*["'](role|content)["']\s*:.*["'](role|content)["']\s*:""", re.DOTALL)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """The task of the user's file.

    rows            rows of the file
    training_rows   indices of the rows that are trained on
    held            rows for evaluation, from index `first_held` on
    other_columns   those that only a reward function of the user may read
    """

    seed: int
    rows: Rows
    training_rows: Int64[ndarray, " r"]
    held: Rows
    first_held: int
    settings: TaskSettings
    rate: Reward
    other_columns: tuple[str, ...] = ()

    characters: ClassVar[str | None] = None

    @property
    def num_training(self) -> int:
        """Return how many rows are trained on."""
        return len(self.training_rows)

    def prompt(self, number: int) -> Prompt:
        """Return a prompt of the training stream: each epoch has every row once, in another order."""
        epoch, index = divmod(number, self.num_training)
        return self.row_prompt(int(self.training_rows[_order(self.seed, epoch, self.num_training)[index]]))

    def row_prompt(self, row: int) -> Prompt:
        """Return the prompt of a row of the training file."""
        return _prompt(self.rows.row(row), self.settings, self.rows.name(row))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return the first held-out prompts, in the order of the file; fewer if it has no more."""
        held, last = self.held, min(self.first_held + count, len(self.held))
        return [_prompt(held.row(i), self.settings, held.name(i)) for i in range(self.first_held, last)]

    def answer(self, prompt: Prompt) -> Any:
        """Return what the answer column holds."""
        return prompt.row.get(self.settings.answer_column)

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:  # noqa: ARG002
        """Return the chosen reward of the text, which does not depend on whether it stopped or was cut.

        raises    RewardError as `Reward` does
        """
        return self.rate(prompt, response)


def open_prompts(settings: TaskSettings, seed: int, evaluation_prompts: int) -> Prompts:
    """Open the files of a task, check every row once, and hold out rows for evaluation.

    evaluation_prompts    rows to hold out of task.file if there is no task.evaluation_file: the last ones, at most half
    raises                ConfigError naming file and line of a row that cannot be used, or as `make_reward` does
    """
    rate = make_reward(settings.reward, settings.answer_column)
    rows, held, other_columns = open_files(settings, evaluation_prompts)
    num_training, first_held = len(rows), 0
    if held is rows:
        num_training = first_held = len(rows) - min(evaluation_prompts, len(rows) // 2)
    return Prompts(
        seed=seed,
        rows=rows,
        training_rows=np.arange(num_training, dtype=np.int64),
        held=held,
        first_held=first_held,
        settings=settings,
        rate=rate,
        other_columns=other_columns,
    )


def rows_state(task: Task) -> dict[str, str]:
    """Return the entry of a checkpoint by which `check_same_rows` knows the rows of a file; {}: there is no file."""
    return {_ROWS: task.rows.digest} if isinstance(task, Prompts) else {}


def check_same_rows(task: Task, state: Mapping[str, Any]) -> None:
    """Raise ConfigError where a task has other rows than when a checkpoint with this state was written.

    With other rows, samples in progress would get other prompts, answers and rewards, and epochs another order.
    """
    if isinstance(task, Prompts) and state.get(_ROWS, task.rows.digest) != task.rows.digest:  # 0.2.0 wrote none
        raise ConfigError(
            f"task.file {str(task.rows.path)!r} holds other rows, or in another order, than when the checkpoint was "
            "written: put the old file back, or start a new run, from its policy if you like (model.path=RUN/policy)"
        )


def open_files(settings: TaskSettings, evaluation_prompts: int) -> tuple[Rows, Rows, tuple[str, ...]]:
    """Return the checked rows to train on and those to evaluate on, and the columns that no setting reads.

    The rows are the same object where one file has both.
    """
    assert settings.file is not None, "RunConfig refuses the task 'prompts' without a file"
    rows, columns = _checked(settings.file, "task.file", settings)
    held = rows
    if settings.evaluation_file is not None:
        held, more = _checked(settings.evaluation_file, "task.evaluation_file", settings)
        columns |= more
    elif evaluation_prompts and len(rows) == 1:
        raise ConfigError(
            f"task.file {str(settings.file)!r} holds one row, which cannot be trained on and held out as well: set "
            "task.evaluation_file, or evaluation.every=0"
        )
    read = {settings.prompt_column, TOOLS, VARIABLES}
    read |= {settings.answer_column} if settings.reward in NEEDS_ANSWER else set()
    return rows, held, tuple(name for name in columns if name not in read)


def _checked(path: Path, setting: str, settings: TaskSettings) -> tuple[Rows, dict[str, None]]:
    """Open a file and check every row, so that a bad one is an error before the run starts; return its columns too."""
    rows = open_rows(path, setting)
    columns: dict[str, None] = {}
    for index, row in enumerate(rows):
        origin = rows.name(index)
        _prompt(row, settings, origin)
        columns |= dict.fromkeys(row)
        if settings.reward in NEEDS_ANSWER:
            right_answer(row, settings.answer_column, origin)
    return rows, columns


def _prompt(row: Mapping[str, Any], settings: TaskSettings, origin: str) -> Prompt:
    name = settings.prompt_column
    value = column(row, name, origin=origin, remedy="set task.prompt_column")
    if settings.prompt_format == "chat" and isinstance(value, str) and _LOOKS_LIKE_MESSAGES.match(value):
        value = _from_json(value, name, origin)
    template = _template_arguments(row, origin)
    if isinstance(value, str) and value:
        _check_text(value, name, origin)
        return Prompt(text=value, template=template, row=row, origin=origin)
    if isinstance(value, list) and value:
        messages = [_message(message, name, origin) for message in value]
        if messages[-1]["role"] == "assistant" and not (settings.continue_final_message and messages[-1]["content"]):
            raise ConfigError(
                f"{origin}: column {name!r} ends with the assistant's message {excerpt(messages[-1]['content'])}: set "
                "task.continue_final_message=true if responses are to continue it and it is not empty, or remove it"
            )
        return Prompt(text=messages, template=template, row=row, origin=origin)
    raise ConfigError(
        f"{origin}: column {name!r} is {excerpt(value)}; a prompt is a text, or a list of chat messages, not empty"
    )


def _template_arguments(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return what a row gives to the chat template: its variables, and `tools`; either may be JSON text."""
    arguments: dict[str, Any] = {}
    for name, kind, what in ((VARIABLES, dict, "an object of variables"), (TOOLS, list, "a list of objects")):
        value = row.get(name)
        value = _without_nulls(_from_json(value, name, origin) if isinstance(value, str) and value else value)
        if not value:
            continue
        if not isinstance(value, kind) or (kind is list and not all(isinstance(tool, dict) for tool in value)):
            raise ConfigError(
                f"{origin}: column {name!r} is {excerpt(value)}, and goes to the chat template: write {what}, or give "
                "the column another name"
            )
        arguments |= value if kind is dict else {name: value}
    return arguments


def _from_json(text: str, name: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{origin}: column {name!r} holds {excerpt(text)}, which is no JSON ({error}): write it as JSON, such as "
            '[{"role": "user", "content": "..."}], or set task.prompt_format=text where it is to be fed as it is'
        ) from error


def _without_nulls(value: Any) -> Any:
    """Leave out fields that are null: Parquet files have the fields of all rows in each."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _message(message: object, name: str, origin: str) -> dict[str, str]:
    """Return a chat message without its null fields, which Parquet files have."""
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if not {"role", "content"} <= set(given) or not all(isinstance(value, str) for value in given.values()):
        raise ConfigError(
            f"{origin}: column {name!r} has the message {excerpt(message)}; a chat message is an object of texts with "
            '"role" and "content"'
        )
    for text in given.values():
        _check_text(text, name, origin)
    return given


def _check_text(text: str, name: str, origin: str) -> None:
    """Raise ConfigError for a text that tokenizers refuse: JSON can hold half of a surrogate pair, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{origin}: column {name!r} holds {text[error.start]!r}, half of a surrogate pair: write whole characters"
        ) from error


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> Int64[ndarray, " r"]:
    """Return the order of the rows in one epoch."""
    return np.random.default_rng([seed, TRAINING_STREAM, epoch]).permutation(num_rows)
