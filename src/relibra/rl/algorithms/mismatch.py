"""Mismatch of trainer and sampler at equal parameters: sums that add up over ranks, metrics, alarms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from relibra.errors import EngineError
from relibra.replay.replay import RouterComparison

_NUM_TOTALS = 8
_BINS_PER_DECADE, _FIRST_DECADE, _DECADES = 50, -8, 10
_NUM_BINS = _BINS_PER_DECADE * _DECADES
"""Bins of abs(log-ratio) from 1e-8 to 100, each 4.7 % wider than the last; the outermost include values beyond."""

_LARGEST_LOG_RATIO = 20.0
"""Log-ratios of importance weights are clamped to this, so that squares of the weights are finite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MismatchSums:
    """Sums that the metrics are computed from; over ranks, `sums` add up and of `largest` the maximum is taken.

    By default over no tokens.

    sums      8 totals, then a histogram of abs(log-ratio)
    largest   abs(log-ratio)
    """

    sums: Float64[Tensor, " Z"] = field(
        default_factory=lambda: torch.zeros(_NUM_TOTALS + _NUM_BINS, dtype=torch.float64)
    )
    largest: float = 0.0

    def __add__(self, other: MismatchSums) -> MismatchSums:
        """Return the sums over the tokens of both."""
        return MismatchSums(sums=self.sums + other.sums, largest=max(self.largest, other.largest))


def mismatch_sums(
    log_probs_X: Float[Tensor, " X"], sampled_X: Float[Tensor, " X"], weight_X: Float[Tensor, " X"]
) -> MismatchSums:
    """Return sums that compare log-probs by the trainer, at the parameters that sampled, with those by the sampler.

    weight_X   by `correction_weights`; tokens of weight 0 count as masked
    """
    trainer_X, sampler_X = log_probs_X.detach().double().cpu(), sampled_X.double().cpu()
    difference_X = trainer_X - sampler_X
    size_X = difference_X.abs().nan_to_num(nan=math.inf, posinf=math.inf)  # nan has no bin
    ratio_X = difference_X.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    totals = [
        torch.tensor(float(len(size_X)), dtype=torch.float64),
        (ratio_X - 1 - difference_X).sum(),
        (size_X > math.log(2)).sum().double(),
        (trainer_X.exp() - sampler_X.exp()).abs().sum(),
        ratio_X.sum(),
        ratio_X.square().sum(),
        (weight_X == 0).sum().double().cpu(),
        size_X.sum(),
    ]
    bin_X = ((size_X.clamp(min=1e-300).log10() - _FIRST_DECADE) * _BINS_PER_DECADE).floor()
    histogram = torch.bincount(bin_X.clamp(0, _NUM_BINS - 1).long(), minlength=_NUM_BINS)
    return MismatchSums(
        sums=torch.cat([torch.stack(totals), histogram.double()]), largest=float(size_X.max()) if len(size_X) else 0.0
    )


def mismatch_metrics(mismatch: MismatchSums) -> dict[str, float | None]:
    """Return metrics from sums over tokens; d = log-prob by trainer - by sampler, w = exp(d). None without tokens.

    k3_kl                    mean of w - 1 - d, estimates KL(sampler, trainer)
    ratio_above_2            share of tokens with w or 1 / w above 2
    log_ratio_mean_abs       mean of abs(d)
    log_ratio_p99            abs(d) that 1 % of tokens exceed, at most 5 % too large
    log_ratio_max            largest abs(d)
    probability_difference   mean of abs(difference of probabilities)
    weight_mean, weight_std  of w
    ess                      (sum w)^2 / (count x sum w^2): effective share of tokens under importance sampling
    chi2                     mean of w^2, minus 1; below 0 only where the mean of w is below 1
    masked_share             tokens that the correction gave weight 0
    """
    count, k3, above, probability, weight, squared_weight, masked, size = mismatch.sums[:_NUM_TOTALS].tolist()
    has_tokens, count = count > 0, count or math.nan
    mean = weight / count
    metrics: dict[str, float | None] = {
        "k3_kl": k3 / count,
        "ratio_above_2": above / count,
        "log_ratio_mean_abs": size / count,
        "log_ratio_p99": min(_quantile(mismatch.sums[_NUM_TOTALS:], 0.99), mismatch.largest),
        "log_ratio_max": mismatch.largest,
        "probability_difference": probability / count,
        "weight_mean": mean,
        "weight_std": math.sqrt(max(0.0, squared_weight / count - mean**2)),
        "ess": weight**2 / (count * squared_weight),
        "chi2": squared_weight / count - 1,
        "masked_share": masked / count,
    }
    return metrics if has_tokens else dict.fromkeys(metrics)


def router_metrics(comparison: RouterComparison) -> dict[str, float | None]:
    """Return shares of rows and choices where the trainer's router differs from the replayed routes; None without rows.

    router_disagreement       share of (row, layer) where the trainer's router chooses another set of experts
    router_rows_differing     share of rows with such a layer
    router_layers_differing   such layers, per row
    router_choices_differing  share of choices: 1 - overlap of the two sets / K
    """
    shares = {
        "router_disagreement": (comparison.differing_pairs, comparison.pairs),
        "router_rows_differing": (comparison.differing_rows, comparison.rows),
        "router_layers_differing": (comparison.differing_pairs, comparison.rows),
        "router_choices_differing": (comparison.differing_choices, comparison.choices),
    }
    return {name: part / whole if whole else None for name, (part, whole) in shares.items()}


LARGEST_MISMATCH = {"float32": 5e-3, "bfloat16": 5e-2}
"""Largest `log_ratio_mean_abs` that rounding explains, by the narrower type of trainer and sampler.

With vLLM 0.29.0: 1e-7 where both compute in float32, 1e-3 to 1e-2 in bfloat16.
"""


def check_mismatch(metrics: Mapping[str, Any], largest: float, *, where: str) -> None:
    """Check that trainer and sampler agree at equal weights; without tokens they do.

    largest   `log_ratio_mean_abs` that passes
    raises    EngineError with figures and likely causes
    """
    found, disagreement = metrics["log_ratio_mean_abs"], metrics["router_disagreement"]
    if found is None or found <= largest:
        return
    routers = "" if disagreement is None else f", router_disagreement {disagreement:.2g}"
    raise EngineError(
        f"{where}: trainer and sampler disagree before any update: log_ratio_mean_abs is {found:.2g}, at most "
        f"{largest:g} is rounding (k3_kl {metrics['k3_kl']:.2g}{routers}); likely causes: randomness in training mode "
        "(dropout, noise of routers), positions that depend on the longest sequence (dynamic rope), a server of other "
        "weights, temperature or type (FP8, quantised), routes that are not replayed (algorithm.replay=off); if it is "
        "meant, raise update.max_mismatch"
    )


_ALARMS: dict[str, tuple[float, float, str]] = {
    "probability_difference": (0.0, 0.01, "trainer and sampler give the same tokens other probabilities"),
    "k3_kl": (0.0, 0.1, "the sampler is another policy than the trainer's"),
    "ess": (0.3, 1.0, "few tokens carry most of the importance weight"),
    "weight_mean": (0.5, 2.0, "importance weights are not 1 on average"),
    "weight_std": (0.0, 1.0, "importance weights scatter"),
    "chi2": (-1.0, 1.0, "importance weights scatter in their squares"),
    "ratio_above_2": (0.0, 0.1, "runs have collapsed soon after this"),
    "failed_rewards": (0.0, 0.0, "these rewards raised or were no number, and their responses were left out"),
    "untrained_steps": (
        0.0,
        2.0,
        "in none of these steps do the rewards of a group differ, so they teach the policy nothing",
    ),
    "skipped_updates": (0.0, 0.0, "gradients were not finite, and changed nothing"),
    "skipped_value_updates": (0.0, 0.0, "gradients of the value model were not finite, and changed nothing"),
    "ran_at_home": (0.0, 0.0, "micro-batches did not follow the plan and ran without its balance"),
}
"""Metric -> least and largest harmless value, and the meaning of others."""


def alarms(metrics: Mapping[str, Any]) -> list[str]:
    """Return one sentence per metric outside of its harmless range.

    The levels are those of verl's documentation of rollout corrections; that of `ratio_above_2` is from arXiv
    2510.11370. Failed rewards, skipped updates and micro-batches off the plan alarm at any count above 0.
    """
    stale = (metrics.get("ahead") or {}).get("age_mean")  # older weights sampled: probabilities have to differ
    sentences, rounding = [], 1e-6  # an ess of 1 may be computed as slightly more
    for name, (low, high, meaning) in _ALARMS.items():
        value = metrics.get(name)
        if value is None or low - rounding <= float(value) <= high + rounding:
            continue
        if name == "probability_difference" and stale:
            continue
        harmless = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        sentences.append(f"{name} is {float(value):.3g}, harmless is {harmless}: {meaning}")
    return sentences


def _quantile(histogram: Tensor, share: float) -> float:
    """Return the upper edge of the bin in which the share is reached."""
    reached = torch.searchsorted(histogram.cumsum(0), share * histogram.sum())
    return float(10 ** ((float(reached) + 1) / _BINS_PER_DECADE + _FIRST_DECADE))
