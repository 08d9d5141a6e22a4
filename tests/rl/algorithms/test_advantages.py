"""Advantages against slow Python that repeats their formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.rl.algorithms.advantages import (
    egae,
    group_advantages,
    length_adaptive_lambda,
    mixed_groups,
    moments,
    whiten,
)


def egae_reference(values, rewards, finished, gamma, lam):
    """Walk one window back from its last token."""
    n = len(rewards)
    if n == 0:
        return []
    following = 0.0 if finished else values[n - 1]
    advantages, last = [0.0] * n, 0.0
    for t in reversed(range(n)):
        residual = rewards[t] + gamma * following - values[t]
        last = residual + gamma * lam * last
        advantages[t], following = last, values[t]
    return advantages


def random_windows(seed, rows, columns, shortest=0):
    """Values, rewards, lengths; nan beyond the length, where nothing may look."""
    rng = np.random.default_rng(seed)
    length_B = rng.integers(shortest, columns + 1, size=rows)
    values_BN, rewards_BN = rng.normal(size=(2, rows, columns))
    for array_BN in (values_BN, rewards_BN):
        array_BN[np.arange(columns) >= length_B[:, None]] = math.nan
    return torch.from_numpy(values_BN), torch.from_numpy(rewards_BN), torch.from_numpy(length_B)


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(1, 9), st.floats(0.5, 1.0))
def test_egae_is_its_walk_back(seed, rows, columns, gamma):
    values_BN, rewards_BN, length_B = random_windows(seed, rows, columns)
    rng = np.random.default_rng(seed)
    lambda_B, finished_B = rng.random(rows), rng.random(rows) < 0.5
    got_BN = egae(
        values_BN,
        rewards_BN,
        length_B,
        torch.from_numpy(finished_B),
        gamma=gamma,
        lambda_B=torch.from_numpy(lambda_B),
    )
    for b, n in enumerate(length_B.tolist()):
        values, rewards = values_BN[b, :n].tolist(), rewards_BN[b, :n].tolist()
        expected = egae_reference(values, rewards, finished_B[b], gamma, lambda_B[b])
        assert got_BN[b, :n].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert not got_BN[b, n:].any()


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5])
def test_egae_of_complete_responses_is_gae(gamma, lam):
    """GAE, arXiv 1506.02438, eq. 16, as the sum that it is."""
    values_BN, rewards_BN, length_B = random_windows(1, 10, 40, shortest=1)
    lambda_B, done_B = torch.full((10,), lam, dtype=torch.float64), torch.ones(10, dtype=torch.bool)
    found_BN = egae(values_BN, rewards_BN, length_B, done_B, gamma=gamma, lambda_B=lambda_B)
    for b, n in enumerate(length_B.tolist()):
        rewards, values = rewards_BN[b, :n].tolist(), values_BN[b, :n].tolist()
        residuals = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
        for t in range(n):
            total = sum((gamma * lam) ** k * residual for k, residual in enumerate(residuals[t:]))
            assert float(found_BN[b, t]) == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_with_an_exact_value_model_the_cut_has_no_bias():
    """A symmetric walk from 10 ends at 0 or at 20, worth 1: V = place / 20. All walks count, not only those cut."""
    rng = np.random.default_rng(0)
    walks, cut = 4000, 30
    place_BN1 = np.full((walks, cut + 1), 10)
    length_B, finished_B = np.full(walks, cut), np.zeros(walks, dtype=bool)
    for t in range(cut):
        place_BN1[:, t + 1] = place_BN1[:, t] + np.where(finished_B, 0, rng.choice([-1, 1], size=walks))
        ends_B = ~finished_B & np.isin(place_BN1[:, t + 1], (0, 20))
        length_B[ends_B], finished_B = t + 1, finished_B | ends_B
    assert 0.02 < finished_B.mean() < 0.9
    rewards_BN = np.zeros((walks, cut))
    rewards_BN[np.arange(walks), length_B - 1] = finished_B & (place_BN1[np.arange(walks), length_B] == 20)
    advantage_BN = egae(
        torch.from_numpy(place_BN1[:, :-1] / 20),
        torch.from_numpy(rewards_BN),
        torch.from_numpy(length_B),
        torch.from_numpy(finished_B),
        gamma=1.0,
        lambda_B=torch.full((walks,), 0.95, dtype=torch.float64),
    ).numpy()
    for t in (0, 5, 10):
        here_B = advantage_BN[length_B > t, t]
        assert abs(here_B.mean()) <= 3 * here_B.std() / math.sqrt(len(here_B))


def test_lambda_follows_the_length_and_has_a_floor():
    lengths = torch.tensor([1, 100, 400, 1024, 8192, 8192 + 4096, 24576])
    got = length_adaptive_lambda(lengths, alpha=0.05, floor=0.95).tolist()
    assert got == pytest.approx([0.95, 0.95, 0.95, 0.98047, 0.997559, 0.998372, 0.999186], abs=5e-7 * 10)
    assert [round(x, 6) for x in got[-3:]] == [0.997559, 0.998372, 0.999186]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), max_size=12), st.booleans())
def test_group_advantages_centre_and_scale_each_group(pairs, divide_by_std):
    groups = torch.tensor([group for group, _ in pairs], dtype=torch.int64)
    rewards = torch.tensor([reward for _, reward in pairs])
    got = group_advantages(rewards, groups, divide_by_std=divide_by_std).tolist()
    mixed = mixed_groups(rewards, groups).tolist()
    for (group, reward), advantage, differs in zip(pairs, got, mixed, strict=True):
        own = [r for g, r in pairs if g == group]
        spread = float(np.std(own, ddof=1)) if len(own) > 1 else 0.0
        scale = spread + 1e-6 if divide_by_std else 1.0
        assert advantage == pytest.approx((reward - float(np.mean(own))) / scale, abs=2e-4)
        assert differs == (len(set(own)) > 1)


def test_groups_with_equal_rewards_teach_nothing():
    rewards, groups = torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([9, 9, -4, 3])
    assert group_advantages(rewards, groups).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert not mixed_groups(rewards, groups).any()


@given(st.integers(0, 1 << 32), st.integers(1, 4))
def test_whitening_over_several_ranks_is_whitening_of_all(seed, ranks):
    rng = np.random.default_rng(seed)
    x_BN = torch.from_numpy(rng.normal(3.0, 5.0, size=(8, 6)).astype(np.float32))
    mask_BN = torch.from_numpy(rng.random((8, 6)) < 0.7)
    mask_BN[0, :2] = True
    shares = np.array_split(np.arange(8), ranks)
    together = sum(moments(x_BN[share], mask_BN[share]) for share in shares)
    got_BN = torch.cat([whiten(x_BN[share], mask_BN[share], together) for share in shares])
    chosen = x_BN[mask_BN].double()
    torch.testing.assert_close(
        got_BN[mask_BN].double(), (chosen - chosen.mean()) / chosen.std(unbiased=False), rtol=1e-5, atol=1e-5
    )
    assert not got_BN[~mask_BN].any()


def test_tokens_outside_the_mask_do_not_move_mean_or_spread():
    """The dropped tail of an unfinished window: tokens that nothing is learned from."""
    x_BN = torch.tensor([[1.0, 2.0, 3.0, 1e9], [2.0, 2.0, math.nan, -math.inf]])
    mask_BN = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert moments(x_BN, mask_BN).tolist() == [5.0, 10.0, 22.0]
    got_BN = whiten(x_BN, mask_BN, moments(x_BN, mask_BN))
    root = math.sqrt(0.4)
    assert got_BN.flatten().tolist() == pytest.approx([-1 / root, 0, 1 / root, 0, 0, 0, 0, 0], abs=1e-6)


def test_whitening_nothing_or_one_value_gives_zeros():
    x_BN, nothing = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert not whiten(x_BN, nothing, moments(x_BN, nothing)).any()
    assert not whiten(x_BN, ~nothing, moments(x_BN, ~nothing)).any()
