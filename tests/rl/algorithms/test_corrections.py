"""Weights for the mismatch of sampler and trainer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.rl.algorithms.terms import correction_weights
from relibra.rl.config.settings import AlgorithmSettings

KINDS = ("off", "tis", "sequence_tis", "icepop", "mis")


def weights_of(kind, log_ratio_X, response_X=None, responses=1):
    response_X = torch.zeros(len(log_ratio_X), dtype=torch.int64) if response_X is None else response_X
    settings = AlgorithmSettings(correction=kind)
    return correction_weights(settings, log_ratio_X, response_X, responses)


@given(st.integers(0, 1 << 32), st.integers(1, 5), st.sampled_from(KINDS))
def test_weights_follow_their_rule(seed, responses, kind):
    rng = np.random.default_rng(seed)
    response_X = np.repeat(np.arange(responses), rng.integers(1, 5, size=responses))
    log_ratio = rng.normal(scale=0.7, size=len(response_X))
    got_X = weights_of(kind, torch.from_numpy(log_ratio), torch.from_numpy(response_X), responses)
    for x, s in enumerate(response_X):
        k = math.exp(log_ratio[x])
        of_response = math.exp(sum(log_ratio[y] for y in range(len(response_X)) if response_X[y] == s))
        expected = {
            "off": 1.0,
            "tis": min(k, 2.0),
            "sequence_tis": min(of_response, 2.0),
            "icepop": k if 0.5 <= k <= 5.0 else 0.0,
            "mis": 1.0 if 0.5 <= k <= 2.0 else 0.0,
        }[kind]
        assert float(got_X[x]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_finite_without_gradient_and_1_if_all_agree(kind):
    log_ratio_X = torch.tensor([0.0, 300.0, -300.0], requires_grad=True)
    got_X = weights_of(kind, log_ratio_X, torch.arange(3), 3)
    assert not got_X.requires_grad
    assert got_X.isfinite().all()
    assert got_X[0] == 1
    assert len(weights_of(kind, torch.zeros(0))) == 0
