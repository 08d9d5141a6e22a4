"""Metrics of trainer against sampler on log-probs made by hand, their sums over ranks, and alarms at their levels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import EngineError
from relibra.replay.replay import RouterComparison
from relibra.rl.algorithms.mismatch import (
    MismatchSums,
    alarms,
    check_mismatch,
    mismatch_metrics,
    mismatch_sums,
    router_metrics,
)


def metrics_of(trainer, sampler, weights=None):
    trainer_X, sampler_X = torch.tensor(trainer).log(), torch.tensor(sampler).log()
    weight_X = torch.ones(len(trainer)) if weights is None else torch.tensor(weights)
    return mismatch_metrics(mismatch_sums(trainer_X, sampler_X, weight_X))


def test_metrics_of_probabilities_made_by_hand():
    """Ratios of trainer to sampler: 1, 2.5, 0.4, 1.5."""
    got = metrics_of([0.5, 0.5, 0.2, 0.3], [0.5, 0.2, 0.5, 0.2], [1.0, 0.0, 0.0, 1.5])
    ratios = [1.0, 2.5, 0.4, 1.5]
    assert got["k3_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4, rel=1e-5)
    assert got["ratio_above_2"] == 0.5
    assert got["log_ratio_max"] == pytest.approx(math.log(2.5), rel=1e-5)
    assert got["log_ratio_p99"] == pytest.approx(math.log(2.5), rel=1e-5)
    assert got["log_ratio_mean_abs"] == pytest.approx((2 * math.log(2.5) + math.log(1.5)) / 4, rel=1e-5)
    assert got["probability_difference"] == pytest.approx((0.3 + 0.3 + 0.1) / 4, rel=1e-5)
    assert got["weight_mean"] == pytest.approx(1.35, rel=1e-5)
    assert got["weight_std"] == pytest.approx(np.std(ratios), rel=1e-5)
    assert got["ess"] == pytest.approx(5.4**2 / (4 * sum(r * r for r in ratios)), rel=1e-5)
    assert got["chi2"] == pytest.approx(sum(r * r for r in ratios) / 4 - 1, rel=1e-5)
    assert got["masked_share"] == 0.5


def test_equal_policies_are_at_no_distance_and_raise_no_alarm():
    got = metrics_of([0.1, 0.9, 0.4], [0.1, 0.9, 0.4])
    assert got.pop("ess") == pytest.approx(1.0)
    assert got.pop("weight_mean") == 1.0
    assert got == pytest.approx(dict.fromkeys(got, 0.0), abs=1e-7)
    assert alarms({**got, "ess": 1.0 + 1e-12, "weight_mean": 1.0}) == []
    assert set(mismatch_metrics(MismatchSums()).values()) == {None}
    assert set(mismatch_metrics(mismatch_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0))).values()) == {None}


def test_log_probs_that_are_no_numbers_only_raise_alarms():
    got = metrics_of([0.5, math.nan, 0.2], [0.5, 0.2, 0.0])
    assert math.isnan(got["k3_kl"])
    assert got["log_ratio_max"] == math.inf
    assert any(sentence.startswith("k3_kl is nan") for sentence in alarms(got))


@given(st.integers(0, 1 << 32), st.integers(1, 5))
def test_sums_over_micro_batches_and_ranks_equal_all_tokens(seed, parts):
    rng = np.random.default_rng(seed)
    sampler_X = torch.from_numpy(-rng.exponential(size=300))
    trainer_X = sampler_X + torch.from_numpy(rng.standard_t(2, size=300) * 0.01)
    weight_X = torch.from_numpy((rng.random(300) < 0.9).astype(float))
    whole = mismatch_sums(trainer_X, sampler_X, weight_X)
    together = MismatchSums()
    for part in np.array_split(np.arange(300), parts):
        together = together + mismatch_sums(trainer_X[part], sampler_X[part], weight_X[part])
    assert mismatch_metrics(together) == pytest.approx(mismatch_metrics(whole), rel=1e-9)
    exact = float(np.quantile((trainer_X - sampler_X).abs().numpy(), 0.99, method="inverted_cdf"))
    assert exact * (1 - 1e-9) <= mismatch_metrics(whole)["log_ratio_p99"] <= exact * 1.05


def test_router_metrics_are_shares_of_rows_layers_and_choices():
    one = RouterComparison(10, 30, 120, 3, 2, 5)
    both = one + RouterComparison(10, 30, 120, 0, 0, 0)
    assert router_metrics(both) == {
        "router_disagreement": 3 / 60,
        "router_rows_differing": 2 / 20,
        "router_layers_differing": 3 / 20,
        "router_choices_differing": 5 / 240,
    }
    assert set(router_metrics(RouterComparison()).values()) == {None}


@pytest.mark.parametrize(
    ("metric", "harmless", "alarming"),
    [
        ("probability_difference", 0.009, 0.011),
        ("k3_kl", 0.09, 0.11),
        ("ess", 0.31, 0.29),
        ("weight_mean", 1.9, 2.1),
        ("weight_mean", 0.51, 0.49),
        ("weight_std", 0.9, 1.1),
        ("chi2", 0.9, 1.1),
        ("chi2", -1.3e-05, 1.1),
        ("ratio_above_2", 0.09, 0.11),
        ("ran_at_home", 0, 1),
    ],
)
def test_alarms_are_raised_at_their_levels(metric, harmless, alarming):
    assert alarms({metric: harmless}) == []
    [sentence] = alarms({metric: alarming, "reward": 1.0})
    assert sentence.startswith(f"{metric} is {alarming:g}, harmless is ")
    assert len(alarms({metric: math.nan})) == 1
    assert alarms({metric: None}) == []


def test_a_mismatch_beyond_the_limit_is_refused():
    metrics = {**metrics_of([0.5, 0.4], [0.5, 0.2]), "router_disagreement": None}
    found = metrics["log_ratio_mean_abs"]
    assert found == pytest.approx(math.log(2) / 2)
    check_mismatch(metrics, found, where="step 0")
    with pytest.raises(EngineError, match=r"step 0: .* log_ratio_mean_abs is 0.35, .*update.max_mismatch"):
        check_mismatch(metrics, 0.9 * found, where="step 0")
    nothing = {**mismatch_metrics(MismatchSums()), "router_disagreement": None}
    check_mismatch(nothing, 1e-9, where="step 0")
    broken = {**metrics_of([0.5, math.nan], [0.5, 0.2]), "router_disagreement": 0.25}
    with pytest.raises(EngineError, match=r"log_ratio_mean_abs is inf, .*router_disagreement 0.25"):
        check_mismatch(broken, 1e9, where="step 0")


def test_older_weights_may_give_other_probabilities():
    metrics = {"probability_difference": 0.02, "k3_kl": 0.2}
    assert len(alarms(metrics | {"ahead": {"age_mean": 0.0}})) == len(alarms(metrics | {"ahead": None})) == 2
    assert [one.split()[0] for one in alarms(metrics | {"ahead": {"age_mean": 1.0}})] == ["k3_kl"]
