"""The value model's loss and its two measures against slow Python and hand tables."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.rl.algorithms.value_loss import auroc, clipped_value_loss, explained_variance, value_sums


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [  # cut to old - 0.5 .. old + 0.6
        (0.2, 0.0, 1.0, 0.64, -1.6),
        (0.9, 0.0, 1.0, 0.16, 0.0),
        (0.9, 0.0, 0.2, 0.49, 1.4),
        (-0.9, 0.0, -1.0, 0.25, 0.0),
        (-0.9, 0.0, 1.0, 3.61, -3.8),
        (0.9, math.nan, 1.0, 0.01, -0.2),
    ],
)
def test_the_value_clip_against_a_table_by_hand(value, old, target, loss, slope):
    value_X = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    got_X = clipped_value_loss(
        value_X,
        torch.tensor([old], dtype=torch.float64),
        torch.tensor([target], dtype=torch.float64),
        clip_low=0.5,
        clip_high=0.6,
    )
    got_X.sum().backward()
    assert got_X.item() == pytest.approx(loss, rel=1e-12)
    assert value_X.grad.item() == pytest.approx(slope, rel=1e-12)


@given(st.integers(0, 1 << 32), st.integers(1, 4))
def test_explained_variance_adds_up_over_ranks(seed, ranks):
    rng = np.random.default_rng(seed)
    returns = rng.normal(2.0, 1.0, size=40).astype(np.float32)
    values = (0.5 * returns + rng.normal(size=40)).astype(np.float32)
    shares = np.array_split(np.arange(40), ranks)
    sums = sum(value_sums(torch.from_numpy(values[share]), torch.from_numpy(returns[share])) for share in shares)
    expected = 1 - np.var(returns.astype(float) - values) / np.var(returns.astype(float))
    assert explained_variance(sums) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_explained_variance_of_perfect_constant_and_bad_values():
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(value_sums(returns, returns)) == 1.0
    assert explained_variance(value_sums(torch.full((4,), 0.3), returns)) == pytest.approx(0.0)
    assert explained_variance(value_sums(1 - returns, returns)) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(value_sums(returns, torch.full((4,), 0.1))))
    assert math.isnan(explained_variance(value_sums(torch.zeros(0), torch.zeros(0))))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=15))
def test_auroc_counts_pairs(pairs):
    score = np.array([0.25 * s for s, _ in pairs])
    correct = np.array([c for _, c in pairs])
    won = [(a > b) + 0.5 * (a == b) for a in score[correct] for b in score[~correct]]
    if won:
        assert auroc(score, correct) == pytest.approx(np.mean(won))
    else:
        assert math.isnan(auroc(score, correct))
