"""The policy's loss against slow Python that repeats its formulas, hand tables, and identities between its forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.rl.algorithms.terms import (
    LossTotals,
    clipped_surrogate,
    sequence_log_ratio,
    token_weights,
)

AGGREGATES = ("token", "token_over_step", "response", "constant")


def random_responses(seed, responses, longest=7):
    """Tokens of each response, and place of the response of each token, in random order of tokens."""
    rng = np.random.default_rng(seed)
    tokens_S = rng.integers(1, longest + 1, size=responses)
    response_X = rng.permutation(np.repeat(np.arange(responses), tokens_S))
    return rng, tokens_S, response_X


@given(st.integers(0, 1 << 32), st.integers(1, 5))
def test_sequence_ratio_is_geometric_mean_with_token_gradients(seed, responses):
    rng, tokens_S, response_X = random_responses(seed, responses)
    log_ratio_X = torch.from_numpy(rng.normal(size=len(response_X))).requires_grad_()
    advantage_S, weight_X = rng.normal(size=responses), rng.normal(size=len(response_X))
    got_X = sequence_log_ratio(log_ratio_X, torch.from_numpy(response_X), responses)
    (torch.from_numpy(weight_X * advantage_S[response_X]) * got_X.exp()).sum().backward()
    for x, s in enumerate(response_X):
        own = [log_ratio_X[y].item() for y in range(len(response_X)) if response_X[y] == s]
        mean = sum(own) / tokens_S[s]
        assert got_X[x].item() == pytest.approx(mean, rel=1e-9, abs=1e-12)
        expected = weight_X[x] * advantage_S[s] * math.exp(mean)
        assert log_ratio_X.grad[x].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped", "slope"),
    [  # clip 0.8 .. 1.28, dual clip 3; slope = derivative by the ratio
        (1.0, 2.0, 2.0, False, 2.0),
        (1.25, 2.0, 2.5, False, 2.0),
        (1.5, 2.0, 2.56, True, 0.0),
        (0.5, 2.0, 1.0, False, 2.0),
        (1.0, -2.0, -2.0, False, -2.0),
        (0.9, -2.0, -1.8, False, -2.0),
        (0.5, -2.0, -1.6, True, 0.0),
        (1.5, -2.0, -3.0, False, -2.0),
        (2.9, -2.0, -5.8, False, -2.0),
        (4.0, -2.0, -6.0, True, 0.0),
        (4.0, 2.0, 2.56, True, 0.0),
        (7.0, 0.0, 0.0, False, 0.0),
    ],
)
def test_clips_against_a_table_by_hand(ratio, advantage, surrogate, clipped, slope):
    log_ratio_X = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    got_X, clipped_X = clipped_surrogate(
        log_ratio_X,
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    got_X.sum().backward()
    assert got_X.item() == pytest.approx(surrogate, rel=1e-12)
    assert clipped_X.tolist() == [clipped]
    assert log_ratio_X.grad.item() == pytest.approx(slope * ratio, rel=1e-12)


def test_extreme_log_ratios_leave_gradients_finite():
    log_ratio_X = torch.tensor([500.0, 500.0, -500.0, -500.0], requires_grad=True)
    got_X, _ = clipped_surrogate(log_ratio_X, torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    got_X.sum().backward()
    assert got_X.isfinite().all()
    assert log_ratio_X.grad.isfinite().all()
    assert got_X[0].item() == pytest.approx(1.2)


def weights(aggregate, tokens_of_response_X, *, step, own, mini_batches, responses, max_response):
    totals = LossTotals(
        tokens=own,
        responses=responses,
        positive_tokens=0,
        step_tokens=step,
        step_positive_tokens=0,
        mini_batches=mini_batches,
    )
    return token_weights(aggregate, tokens_of_response_X, totals, max_response)


@given(st.integers(0, 1 << 32), st.integers(1, 6), st.integers(1, 4))
def test_weights_are_the_means_they_stand_for(seed, responses, mini_batches):
    rng, tokens_S, response_X = random_responses(seed, responses)
    surrogate_X, step = rng.normal(size=len(response_X)), 3 * len(response_X)
    means = [surrogate_X[response_X == s].mean() for s in range(responses)]
    expected = {
        "token": surrogate_X.mean(),
        "token_over_step": surrogate_X.sum() / (step / mini_batches),
        "response": np.mean(means),
        "constant": np.mean([surrogate_X[response_X == s].sum() / 100 for s in range(responses)]),
    }
    for aggregate in AGGREGATES:
        weight_X = weights(
            aggregate,
            torch.from_numpy(tokens_S[response_X]),
            step=step,
            own=len(response_X),
            mini_batches=mini_batches,
            responses=responses,
            max_response=100,
        )
        got = float((weight_X.double() * torch.from_numpy(surrogate_X)).sum())
        assert got == pytest.approx(expected[aggregate], rel=1e-5, abs=1e-6)
