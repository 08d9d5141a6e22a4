"""The long tail of the lengths: most problems are short, a few are several times as long."""

from __future__ import annotations

from numpy.random import Generator


def draw_length(rng: Generator, *, shortest: int, longest: int, continue_probability: float) -> int:
    """Draw a length: start at `shortest`, go on with `continue_probability` each time, end at `longest`.

    So P(length > n) = continue_probability ^ (n - shortest + 1) below `longest`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> [draw_length(rng, shortest=2, longest=5, continue_probability=0.5) for _ in range(8)]
    [2, 5, 2, 2, 2, 2, 2, 2]
    """
    length = shortest
    while length < longest and rng.random() < continue_probability:
        length += 1
    return length
