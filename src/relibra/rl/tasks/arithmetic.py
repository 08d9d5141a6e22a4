"""Chains of additions modulo 10: easy to check, with response lengths that have a long tail.

    prompt     7+5+8=
    response   7+5=2,2+8=0.

Each link of the chain repeats the running digit and the next term, so that a tiny model can learn it; the reward looks
at the last digit only.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

STOP = "."
CHARACTERS = "0123456789+=," + STOP


@dataclass(frozen=True)
class Problem:
    """A prompt and the digits it adds up."""

    prompt: str
    terms: tuple[int, ...]


def draw_problem(rng: Generator, *, max_terms: int, continue_probability: float) -> Problem:
    """Draw a chain: two terms, then one more with `continue_probability` each time, up to `max_terms`."""
    length = 2
    while length < max_terms and rng.random() < continue_probability:
        length += 1
    terms = tuple(int(term) for term in rng.integers(10, size=length))
    return Problem("+".join(map(str, terms)) + "=", terms)


def demonstrate(problem: Problem, rng: Generator, *, slip: float = 0.0) -> str:
    """Write the chain as a teacher would who gets each link wrong with probability `slip`, and goes on from there.

    >>> import numpy as np
    >>> demonstrate(Problem("7+5+8=", (7, 5, 8)), np.random.default_rng(0))
    '7+5=2,2+8=0.'
    """
    running, links = problem.terms[0], []
    for term in problem.terms[1:]:
        result = int(rng.integers(10)) if rng.random() < slip else (running + term) % 10
        links.append(f"{running}+{term}={result}")
        running = result
    return ",".join(links) + STOP


def reward(problem: Problem, response: str) -> float:
    """Return 1.0 if the response stops and ends in the right digit, else 0.0.

    >>> reward(Problem("7+5+8=", (7, 5, 8)), "7+5=2,2+8=0.")
    1.0
    """
    if not response.endswith(STOP) or response.count(STOP) != 1:
        return 0.0
    return float(response.removesuffix(STOP).endswith(f"={sum(problem.terms) % 10}"))
