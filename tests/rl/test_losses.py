"""Losses, distances and advantages against slow Python that repeats their formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.rl.advantages import group_advantages
from relibra.rl.losses import clipped_policy_loss, k3_divergence, token_log_probs


def clipped_policy_loss_reference(logp, old, advantage, mask, low, high):
    """Equation 7 of PPO, token by token."""
    total = 0.0
    for b, row in enumerate(mask):
        for t, trained in enumerate(row):
            if trained:
                ratio = math.exp(logp[b][t] - old[b][t])
                clipped = min(max(ratio, 1 - low), 1 + high)
                total -= min(ratio * advantage[b], clipped * advantage[b])
    return total


@st.composite
def token_batches(draw):
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    logp, old = -rng.exponential(size=(2, *shape))
    return logp, old, rng.normal(size=shape[0]), rng.random(shape) < 0.6


@given(token_batches(), st.floats(0.05, 0.9), st.floats(0.05, 3.0))
def test_clipped_policy_loss_is_its_formula(batch, low, high):
    logp, old, advantage, mask = batch
    loss = clipped_policy_loss(*map(torch.from_numpy, batch), clip_low=low, clip_high=high)
    assert float(loss) == pytest.approx(
        clipped_policy_loss_reference(logp, old, advantage, mask, low, high), rel=1e-9, abs=1e-12
    )


def test_gradient_stops_where_the_ratio_is_clipped():
    logp = torch.tensor([[math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]], requires_grad=True)
    mask = torch.ones(1, 4, dtype=torch.bool)
    gradients = []
    for advantage in (1.0, -1.0):
        loss = clipped_policy_loss(
            logp, torch.zeros(1, 4), torch.tensor([advantage]), mask, clip_low=0.2, clip_high=0.28
        )
        gradients.append(torch.autograd.grad(loss, logp)[0].flatten().tolist())
    good, bad = gradients
    assert good == pytest.approx([0.0, 0.0, -0.5, -0.5])  # a good token that is likely enough already is left alone
    assert bad == pytest.approx([1.5, 1.5, 0.0, 0.0])


def test_tokens_outside_the_mask_do_nothing_even_when_they_are_infinite():
    logp = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss = clipped_policy_loss(
        logp, torch.tensor([[-1.0, -2.0]]), torch.tensor([2.0]), mask, clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert loss.item() == -2.0
    assert logp.grad.tolist() == [[-2.0, 0.0]]


@given(st.integers(0, 1 << 32), st.floats(0.2, 5.0))
def test_token_log_probs_are_log_softmax_of_the_column_before(seed, temperature):
    rng = np.random.default_rng(seed)
    logits, tokens = rng.normal(size=(2, 4, 5)), rng.integers(5, size=(2, 4))
    got = token_log_probs(torch.from_numpy(logits), torch.from_numpy(tokens), temperature)
    for b in range(2):
        assert got[b, 0] == 0
        for t in range(1, 4):
            weights = np.exp(logits[b, t - 1] / temperature)
            assert float(got[b, t]) == pytest.approx(math.log(weights[tokens[b, t]] / weights.sum()), abs=1e-5)


def test_k3_is_zero_at_zero_positive_elsewhere_and_estimates_the_divergence():
    difference = torch.arange(-20, 21, dtype=torch.float64) / 10
    k3 = k3_divergence(difference)
    assert k3[20] == 0
    assert bool((k3[difference != 0] > 0).all())
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    expected = (p * (p / q).log()).sum()
    assert float((p * k3_divergence((q / p).log())).sum()) == pytest.approx(float(expected), rel=1e-12)
    assert float(k3_divergence(torch.tensor(1e-6, dtype=torch.float64))) == pytest.approx(5e-13, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), max_size=12))
def test_group_advantages_centre_and_scale_each_group(pairs):
    groups = torch.tensor([group for group, _ in pairs], dtype=torch.int64)
    rewards = torch.tensor([reward for _, reward in pairs])
    got = group_advantages(rewards, groups).tolist()
    for (group, reward), advantage in zip(pairs, got, strict=True):
        own = [r for g, r in pairs if g == group]
        spread = float(np.std(own, ddof=1)) if len(own) > 1 else 0.0
        assert advantage == pytest.approx((reward - float(np.mean(own))) / (spread + 1e-6), abs=2e-4)


def test_groups_with_equal_rewards_teach_nothing():
    assert group_advantages(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([9, 9, -4])).tolist() == [0.0, 0.0, 0.0]
