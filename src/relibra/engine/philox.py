"""Uniform numbers for sampling tokens, as a function of seed, response and position (Philox)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Integer, UInt64
from numpy import ndarray

_STREAM = 4
"""Random stream of sampling, separate from the others of the run's seed."""
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform_numbers(
    seed: int, sample_ids_B: Integer[ndarray, " B"], positions_B: Integer[ndarray, " B"]
) -> Float64[ndarray, " B"]:
    """Return the number in [0, 1) of each (seed, sample, position in the response).

    A counter-based generator has no state, so a token's number does not depend on its batch, rank or window.

    source    Philox4x32-10: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    keys_2B = np.array(sampling_key(seed), dtype=np.uint64)[:, None].repeat(len(sample_ids_B), axis=1)
    return uniform_numbers_of_keys(keys_2B, sample_ids_B, positions_B)


def sampling_key(seed: int) -> tuple[int, int]:
    """Return the key that a seed stands for."""
    key = np.random.SeedSequence([seed, _STREAM]).generate_state(2, np.uint32)
    return int(key[0]), int(key[1])


def uniform_numbers_of_keys(
    keys_2B: UInt64[ndarray, "2 B"], sample_ids_B: Integer[ndarray, " B"], positions_B: Integer[ndarray, " B"]
) -> Float64[ndarray, " B"]:
    """Return `uniform_numbers` where each sample has its own seed; `keys_2B` are their `sampling_key`s."""
    sample_B = sample_ids_B.astype(np.int64).view(np.uint64)
    position_B = positions_B.astype(np.int64).view(np.uint64)
    counter_4B = np.stack([sample_B & _LOW, sample_B >> _HALF, position_B & _LOW, position_B >> _HALF])
    word_4B = philox(counter_4B, keys_2B[0], keys_2B[1])
    high_B, low_B = word_4B[0] >> np.uint64(5), word_4B[1] >> np.uint64(6)  # 27 + 26 bits fill a float64's fraction
    return (high_B * np.uint64(1 << 26) + low_B).astype(np.float64) / float(1 << 53)


def philox(
    counter_4B: UInt64[ndarray, "4 B"], key_0: int | UInt64[ndarray, " B"], key_1: int | UInt64[ndarray, " B"]
) -> UInt64[ndarray, "4 B"]:
    """Return the four 32-bit words of Philox4x32-10 for each counter and key, each word in a uint64."""
    x0, x1, x2, x3 = counter_4B
    k0, k1 = np.uint64(key_0), np.uint64(key_1)
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product_1 >> _HALF) ^ x1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ x3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([x0, x1, x2, x3])
