"""Uniform numbers by counter: the published generator, fair, and the same for a token in any company."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.engine.philox import philox, uniform_numbers


def test_the_generator_gives_its_published_answers():
    """Known answers that its authors ship with their implementation."""
    ones = 0xFFFFFFFF
    cases = [
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, (ones, ones), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        assert philox(np.array(counter, dtype=np.uint64)[:, None], *key)[:, 0].tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 31)), min_size=1, max_size=20),
    st.integers(0, 1 << 200),
    st.randoms(use_true_random=False),
)
def test_a_number_belongs_to_its_token_in_any_order_and_company(tokens, seed, random):
    def numbers(pairs):
        samples, positions = np.array(pairs).T
        return uniform_numbers(seed, samples, positions).tolist()

    expected = dict(zip(tokens, numbers(tokens), strict=True))
    shuffled = random.sample(tokens, len(tokens))
    assert numbers(shuffled) == [expected[token] for token in shuffled]
    assert [numbers([token])[0] for token in tokens] == numbers(tokens)
    assert all(0 <= number < 1 for number in expected.values())


def grid(seed, samples=400, positions=500):
    """Numbers of small ids and places, as a run asks for them."""
    sample_B, position_B = np.divmod(np.arange(samples * positions), positions)
    return uniform_numbers(seed, sample_B, position_B).reshape(samples, positions)


def test_numbers_are_spread_evenly():
    """Chi-squared over 1,000 bins of 200,000 numbers: mean 999, standard deviation sqrt(2 x 999) = 45."""
    for seed in (0, 1, 12345678901234567890):
        number = grid(seed)
        counts = np.histogram(number, bins=1000, range=(0, 1))[0]
        assert abs(((counts - 200) ** 2 / 200).sum() - 999) < 5 * 45
        assert len(np.unique(number)) == number.size
        assert abs(number.mean() - 0.5) < 5 * np.sqrt(1 / 12 / number.size)


def test_neighbours_know_nothing_of_each_other():
    """Correlations between samples, places and seeds lie within five standard errors of nothing."""
    number = grid(0) - 0.5
    pairs = [
        (number[1:], number[:-1]),
        (number[:, 1:], number[:, :-1]),
        (number[2:, 1:], number[:-2, :-1]),
        (number, grid(1) - 0.5),
    ]
    for one, other in pairs:
        assert abs((one * other).mean()) < 5 / 12 / np.sqrt(one.size)
    per_sample = number.mean(axis=1) / np.sqrt(1 / 12 / number.shape[1])
    assert abs(per_sample.std() - 1) < 0.2
    assert abs(per_sample).max() < 5


def test_ids_beyond_32_bits_count_in_full():
    ids = np.array([5, 5 + (1 << 32), 5 + (1 << 40), -5])
    assert len(set(uniform_numbers(0, ids, np.zeros_like(ids)).tolist())) == 4
    assert len(set(uniform_numbers(0, np.zeros_like(ids), ids).tolist())) == 4
