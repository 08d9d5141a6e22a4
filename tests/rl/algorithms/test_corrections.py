"""Weights for the mismatch of sampler and trainer: their rules, and what they are for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.rl.algorithms.mismatch import mismatch_metrics, mismatch_sums
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


def test_a_few_tokens_that_the_engine_got_wrong_are_removed():
    """0.2 % of tokens, all of one rare kind, are 20 times likelier for the trainer than they were for the sampler."""
    rng = np.random.default_rng(0)
    tokens, features, kinds = 20_000, 16, 12
    inputs_XH = torch.from_numpy(rng.normal(size=(tokens, features)))
    wrong_X = torch.from_numpy(rng.random(tokens) < 0.002)
    inputs_XH[wrong_X] += torch.from_numpy(rng.normal(size=features)) * 2  # they come in like contexts
    token_X = torch.where(wrong_X, 3, torch.from_numpy(rng.integers(kinds, size=tokens)))
    advantage_X = torch.where(wrong_X, 1.0, torch.from_numpy(rng.choice([-1.0, 1.0], size=tokens)))
    noise_X = torch.from_numpy(rng.normal(scale=0.02, size=tokens))
    clean_X, seen_X = noise_X, torch.where(wrong_X, math.log(20), noise_X)

    def gradient_norm(weight_X):
        head_HV = torch.zeros(features, kinds, dtype=torch.float64, requires_grad=True)
        log_probs_X = (inputs_XH @ head_HV).log_softmax(1).gather(1, token_X[:, None]).squeeze(1)
        loss = -(weight_X * advantage_X * log_probs_X).mean()
        return torch.autograd.grad(loss, head_HV)[0].norm().item()

    clean = gradient_norm(clean_X.exp() * ~wrong_X)
    assert gradient_norm(seen_X.exp()) > 3 * clean
    for kind in ("icepop", "mis"):
        weight_X = weights_of(kind, seen_X)
        assert clean / 1.2 < gradient_norm(weight_X) < 1.2 * clean
        sampled_X = -torch.rand(tokens, dtype=torch.float64) - 4
        metrics = mismatch_metrics(mismatch_sums(sampled_X + seen_X, sampled_X, weight_X))
        assert 0.001 < metrics["masked_share"] < 0.003
        assert metrics["masked_share"] == metrics["ratio_above_2"] == pytest.approx(float(wrong_X.double().mean()))
