"""Random numbers for kernels: splitmix64 (Steele, Lea, Flood 2014), the same bytes in every process and thread."""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from relibra.routing.compiled import compiled


@compiled
@no_type_check
def random_bits(state) -> int:
    """Return 64 random bits and advance the state, an array of one uint64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
@no_type_check
def below(state, n) -> int:
    """Return a whole number in 0..n-1."""
    return np.int64((random_bits(state) >> np.uint64(33)) % np.uint64(n))


@compiled
@no_type_check
def uniform(state) -> float:
    """Return a number in [0, 1)."""
    return np.float64(random_bits(state) >> np.uint64(11)) / 9007199254740992.0  # 2^53
