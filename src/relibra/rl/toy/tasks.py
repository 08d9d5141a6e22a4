"""Tasks that a tiny model can learn: chains of additions, and strings to reverse.

Response lengths have a long tail: most are short, a few are several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from relibra.rl.tasks.task import EVALUATION_STREAM, TRAINING_STREAM, Prompt

STOP = "."
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class _ToyTask:
    """A task that draws each prompt from a generator of its own; subclasses define `draw`."""

    seed: int

    def prompt(self, number: int) -> Prompt:
        """Return a prompt of the training stream."""
        return self.draw(np.random.default_rng([self.seed, TRAINING_STREAM, number]))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return held-out prompts; they do not depend on the seed, so that runs can be compared."""
        return [self.draw(np.random.default_rng([EVALUATION_STREAM, number])) for number in range(count)]

    def draw(self, rng: Generator) -> Prompt:
        """Draw a prompt."""
        raise NotImplementedError


@dataclass(frozen=True)
class Arithmetic(_ToyTask):
    """Sums modulo 10 of 2 to `max_terms` digits; `draw_length` draws the number of terms.

        prompt     7+5+8=
        response   7+5=2,2+8=0

    Each link of the chain repeats the running digit and the next term, so that a tiny model can learn it. The reward
    checks the last digit only.
    """

    max_terms: int
    continue_probability: float
    tail_exponent: float = 0.0

    characters: ClassVar[str] = "0123456789+=," + STOP

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:
        """Return 1.0 if the response stopped and its last digit is right, else 0.0.

        >>> task = Arithmetic(seed=0, max_terms=12, continue_probability=0.72)
        >>> task.reward(problem([7, 5, 8]), "7+5=2,2+8=0", stopped=True)
        1.0
        """
        return float(stopped and response.endswith(f"={self.answer(prompt)}"))

    def answer(self, prompt: Prompt) -> int:
        """Return the last digit of the sum."""
        return int(sum(prompt.row["terms"])) % 10

    def demonstrate(self, prompt: Prompt, rng: Generator, *, error_rate: float) -> str:
        """Return a chain; with probability `error_rate` a link ends in a random digit, and the chain continues with it.

        >>> task = Arithmetic(seed=0, max_terms=12, continue_probability=0.72)
        >>> task.demonstrate(problem([7, 5, 8]), np.random.default_rng(0), error_rate=0.0)
        '7+5=2,2+8=0'
        """
        running, *following = prompt.row["terms"]
        links = []
        for term in following:
            result = int(rng.integers(10)) if rng.random() < error_rate else (running + term) % 10
            links.append(f"{running}+{term}={result}")
            running = result
        return ",".join(links)

    def draw(self, rng: Generator) -> Prompt:
        """Draw a problem."""
        length = draw_length(rng, self.max_terms, self.continue_probability, self.tail_exponent)
        return problem([int(term) for term in rng.integers(10, size=length)])


@dataclass(frozen=True)
class Strings(_ToyTask):
    """Words of 2 to `max_letters` letters; each further letter has the chance `continue_probability`.

        prompt     relibra=
        response   arbiler

    The response is the word from the last letter to the first, and every letter must be right.
    """

    max_letters: int
    continue_probability: float

    characters: ClassVar[str] = LETTERS + "=" + STOP

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:
        """Return 1.0 if the response stopped and every letter is right, else 0.0."""
        return float(stopped and response == self.answer(prompt))

    def answer(self, prompt: Prompt) -> str:
        """Return the letters from the last one to the first."""
        return str(prompt.row["word"][::-1])

    def demonstrate(self, prompt: Prompt, rng: Generator, *, error_rate: float) -> str:
        """Return the answer, each letter replaced by a random one with probability `error_rate`."""
        letters = self.answer(prompt)
        return "".join(_draw_letters(rng, 1) if rng.random() < error_rate else letter for letter in letters)

    def draw(self, rng: Generator) -> Prompt:
        """Draw a word."""
        word = _draw_letters(rng, draw_length(rng, self.max_letters, self.continue_probability))
        return Prompt(text=f"{word}=", row={"word": word})


def draw_length(rng: Generator, longest: int, continue_probability: float, tail_exponent: float = 0.0) -> int:
    """Draw the length of a problem, from 2 to `longest`.

    tail_exponent   0: a geometric tail, P(length > n) = continue_probability ^ (n - 1) below `longest`;
                    above 0: a power law, P(length > n) = (2 / (n + 1)) ^ tail_exponent, a much heavier tail

    >>> rng = np.random.default_rng(0)
    >>> [draw_length(rng, 5, continue_probability=0.5) for _ in range(8)]
    [2, 5, 2, 2, 2, 2, 2, 2]
    """
    shortest = 2
    if tail_exponent:
        rest = 1 - rng.random()
        if -math.log(rest) / tail_exponent >= math.log(longest / shortest):
            return longest  # compared as logarithms: the power may overflow
        return int(shortest * rest ** (-1 / tail_exponent))
    length = shortest
    while length < longest and rng.random() < continue_probability:
        length += 1
    return length


def problem(terms: Sequence[int]) -> Prompt:
    """Return the prompt that asks for the sum of some digits.

    >>> problem([7, 5, 8]).text
    '7+5+8='
    """
    return Prompt(text="+".join(map(str, terms)) + "=", row={"terms": tuple(terms)})


def _draw_letters(rng: Generator, count: int) -> str:
    return "".join(LETTERS[place] for place in rng.integers(len(LETTERS), size=count))
