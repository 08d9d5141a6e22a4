"""`Task`: the interface of prompts and rewards. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from numpy.random import Generator

from relibra.errors import ConfigError

TRAINING_STREAM = 2
EVALUATION_STREAM = 3
"""Random streams of prompts. Seeds: [seed, stream, number or epoch] in training, [stream, number] in evaluation."""


Messages = list[dict[str, str]]
"""Chat messages: objects with "role" and "content"."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    text       plain text, or chat messages for the model's chat template
    template   arguments of the chat template for this prompt alone: `tools`, variables
    row        data for the reward: columns of the user's file, or data of a built-in task
    origin     file and line, for error messages; empty for a built-in task
    """

    text: str | Messages
    template: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""


class RewardError(ConfigError):
    """A user's reward function raised, or returned no number, for one response."""


@runtime_checkable
class Task(Protocol):
    """An endless, reproducible stream of prompts, and their rewards."""

    @property
    def characters(self) -> str | None:
        """Alphabet of a built-in task; its last character ends a response. None: the task needs a model's tokenizer."""
        ...

    def prompt(self, number: int) -> Prompt:
        """Return a prompt of the training stream; it depends only on the run's seed and the number."""
        ...

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return the first held-out prompts, always the same; fewer than `count` if a file has no more."""
        ...

    def answer(self, prompt: Prompt) -> Any:
        """Return the right answer, for logs; None: the prompt has none."""
        ...

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:
        """Return the reward of a response.

        response   text without the stop token
        stopped    ended by a stop token; False: cut at rollout.max_response
        raises     RewardError, naming prompt and function, if a user's function raises or returns no finite number
        """
        ...


@runtime_checkable
class Demonstrating(Protocol):
    """A task that can write demonstrations for the supervised warm-up."""

    def demonstrate(self, prompt: Prompt, rng: Generator, *, error_rate: float) -> str:
        """Return an answer without its stop token, with random errors of probability `error_rate`."""
        ...
