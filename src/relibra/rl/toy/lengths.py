"""Problem lengths with a long tail: most are short, a few are several times as long."""

from __future__ import annotations

import math

from numpy.random import Generator


def draw_length(
    rng: Generator, *, shortest: int, longest: int, continue_probability: float, tail_exponent: float = 0.0
) -> int:
    """Draw a length from `shortest` to `longest`.

    tail_exponent   0: a geometric tail, P(length > n) = continue_probability ^ (n - shortest + 1) below `longest`;
                    above 0: a power law, P(length > n) = (shortest / (n + 1)) ^ tail_exponent, a much heavier tail

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> [draw_length(rng, shortest=2, longest=5, continue_probability=0.5) for _ in range(8)]
    [2, 5, 2, 2, 2, 2, 2, 2]
    """
    if tail_exponent:
        rest = 1 - rng.random()
        if -math.log(rest) / tail_exponent >= math.log(longest / shortest):
            return longest  # compared as logarithms: the power may overflow
        return int(shortest * rest ** (-1 / tail_exponent))
    length = shortest
    while length < longest and rng.random() < continue_probability:
        length += 1
    return length
