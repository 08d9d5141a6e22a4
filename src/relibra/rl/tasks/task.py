"""`Task`: where prompts come from and what a response is worth. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from numpy.random import Generator

TRAINING_STREAM = 2
EVALUATION_STREAM = 3
"""First numbers of the random streams that built-in prompts and orders of rows are drawn from."""


Messages = list[dict[str, str]]
"""Chat messages: objects with "role" and "content"."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One thing to answer.

    text     what the policy reads; or chat messages, `[{"role": ..., "content": ...}, ...]`, for a chat template
    row      whatever the reward looks at: columns of the user's file, or what a built-in task made up
    origin   where it stands, for messages: file and line; empty for a built-in task
    """

    text: str | Messages
    row: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""


@runtime_checkable
class Task(Protocol):
    """An endless, reproducible stream of prompts, and their rewards."""

    @property
    def characters(self) -> str | None:
        """The alphabet of a built-in task, for `CharacterTokenizer`; its last character ends a response and is no part
        of any. None: the task needs the tokenizer of a model.
        """
        ...

    def prompt(self, number: int) -> Prompt:
        """Return a prompt of the training stream; it follows from the run's seed and the number alone."""
        ...

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return the first held-out prompts: always the same, and none of the training stream's problems on purpose.

        Fewer than `count` where a file holds no more.
        """
        ...

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:
        """Return what a response is worth.

        response   without the token that ended it
        stopped    it ended itself (else it was cut at the longest response)
        raises     ConfigError, naming prompt and function, where a user's function raises or returns no finite number
        """
        ...


@runtime_checkable
class Demonstrating(Protocol):
    """A task that can show how it is done, for the supervised warm-up."""

    def demonstrate(self, prompt: Prompt, rng: Generator, *, error_rate: float) -> str:
        """Return an answer without its stop token, with random errors of probability `error_rate`."""
        ...
