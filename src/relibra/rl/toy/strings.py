"""Words to sort or to reverse, with a long tail of response lengths.

    prompt     relibra=
    response   arbiler      (reverse)
    response   abeilrr      (sort)

The response is as long as the word, and every letter must be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator

from relibra.rl.tasks.task import EVALUATION_STREAM, TRAINING_STREAM, Prompt
from relibra.rl.toy.lengths import draw_length

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STOP = "."
CHARACTERS = LETTERS + "=" + STOP


@dataclass(frozen=True)
class Strings:
    """The task: words of 2 to `max_letters` letters; each further letter has the chance `continue_probability`."""

    seed: int
    operation: Literal["sort", "reverse"]
    max_letters: int
    continue_probability: float

    characters: ClassVar[str] = CHARACTERS

    def prompt(self, number: int) -> Prompt:
        """Return a prompt of the training stream."""
        return self._draw(np.random.default_rng([self.seed, TRAINING_STREAM, number]))

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """Return held-out prompts; they do not depend on the seed, so that runs can be compared."""
        return [self._draw(np.random.default_rng([EVALUATION_STREAM, number])) for number in range(count)]

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:
        """Return 1.0 if the response stopped and every letter is right, else 0.0."""
        return float(stopped and response == rearranged(prompt.row["word"], self.operation))

    def demonstrate(self, prompt: Prompt, rng: Generator, *, error_rate: float) -> str:
        """Return the answer, each letter replaced by a random one with probability `error_rate`."""
        answer = rearranged(prompt.row["word"], self.operation)
        return "".join(_draw_letters(rng, 1) if rng.random() < error_rate else letter for letter in answer)

    def _draw(self, rng: Generator) -> Prompt:
        length = draw_length(rng, shortest=2, longest=self.max_letters, continue_probability=self.continue_probability)
        word = _draw_letters(rng, length)
        return Prompt(text=f"{word}=", row={"word": word})


def rearranged(word: str, operation: Literal["sort", "reverse"]) -> str:
    """Return the letters in alphabetical order, or from the last to the first.

    >>> rearranged("relibra", "sort"), rearranged("relibra", "reverse")
    ('abeilrr', 'arbiler')
    """
    return "".join(sorted(word)) if operation == "sort" else word[::-1]


def _draw_letters(rng: Generator, count: int) -> str:
    return "".join(LETTERS[place] for place in rng.integers(len(LETTERS), size=count))
