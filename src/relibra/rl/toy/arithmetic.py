"""Chains of additions modulo 10, with a long tail of response lengths.

    prompt     7+5+8=
    response   7+5=2,2+8=0

Each link of the chain repeats the running digit and the next term, so that a tiny model can learn it. The reward checks
the last digit only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from relibra.rl.tasks.task import EVALUATION_STREAM, TRAINING_STREAM, Prompt
from relibra.rl.toy.lengths import draw_length

STOP = "."
CHARACTERS = "0123456789+=," + STOP


@dataclass(frozen=True)
class Arithmetic:
    """The task: sums of 2 to `max_terms` digits; `draw_length` draws the number of terms."""

    seed: int
    max_terms: int
    continue_probability: float
    tail_exponent: float = 0.0

    characters: ClassVar[str] = CHARACTERS

    def prompt(self, number: int) -> Prompt:
        """Return a prompt of the training stream."""
        return self._draw(np.random.default_rng([self.seed, TRAINING_STREAM, number]))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return held-out prompts; they do not depend on the seed, so that runs can be compared."""
        return [self._draw(np.random.default_rng([EVALUATION_STREAM, number])) for number in range(count)]

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:
        """Return 1.0 if the response stopped and its last digit is right, else 0.0.

        >>> task = Arithmetic(seed=0, max_terms=12, continue_probability=0.72)
        >>> task.reward(problem([7, 5, 8]), "7+5=2,2+8=0", stopped=True)
        1.0
        """
        return float(stopped and response.endswith(f"={sum(prompt.row['terms']) % 10}"))

    def demonstrate(self, prompt: Prompt, rng: Generator, *, error_rate: float) -> str:
        """Return a chain whose links are wrong with probability `error_rate`."""
        return write_chain(prompt.row["terms"], rng, error_rate=error_rate)

    def _draw(self, rng: Generator) -> Prompt:
        length = draw_length(
            rng,
            shortest=2,
            longest=self.max_terms,
            continue_probability=self.continue_probability,
            tail_exponent=self.tail_exponent,
        )
        return problem([int(term) for term in rng.integers(10, size=length)])


def problem(terms: Sequence[int]) -> Prompt:
    """Return the prompt that asks for the sum of some digits.

    >>> problem([7, 5, 8]).text
    '7+5+8='
    """
    return Prompt(text="+".join(map(str, terms)) + "=", row={"terms": tuple(terms)})


def write_chain(terms: Sequence[int], rng: Generator, *, error_rate: float = 0.0) -> str:
    """Return the chain; with probability `error_rate` a link ends in a random digit, and the chain continues with it.

    >>> write_chain([7, 5, 8], np.random.default_rng(0))
    '7+5=2,2+8=0'
    """
    running, links = terms[0], []
    for term in terms[1:]:
        result = int(rng.integers(10)) if rng.random() < error_rate else (running + term) % 10
        links.append(f"{running}+{term}={result}")
        running = result
    return ",".join(links)
