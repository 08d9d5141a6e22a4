"""Importance weights of tokens, for log-probs of the sampler that differ from the trainer's at equal parameters."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Correction = Literal["off", "tis", "sequence_tis", "icepop", "mis"]
"""See `correction_weights`."""

_LARGEST_LOG_SUM = 20.0
"""The log-ratio of a whole response is clamped to this, so that its exponential is finite."""


def correction_weights(
    kind: Correction,
    log_ratio_X: Float[Tensor, " X"],
    response_X: Int[Tensor, " X"],
    num_responses: int,
    *,
    low: float,
    high: float,
) -> Float[Tensor, " X"]:
    """Return a weight for the surrogate of each token, without gradient; k = probability by trainer / by sampler.

    off            1
    tis            min(k, high): truncated importance sampling
    sequence_tis   the same with the product of k over the response
    icepop         k within low .. high, else 0: IcePop, arXiv 2510.18855
    mis            1 within low .. high, else 0: other tokens are rejected, none is reweighted

    log_ratio_X    log-probs by the trainer, at the parameters that sampled, minus those by the sampler
    response_X     index of each token's response, 0 .. num_responses - 1
    """
    log_ratio_X = log_ratio_X.detach()
    if kind == "off":
        return torch.ones_like(log_ratio_X)
    if kind == "sequence_tis":
        sum_S = log_ratio_X.new_zeros(num_responses).index_add(0, response_X, log_ratio_X)
        return sum_S.clamp(-_LARGEST_LOG_SUM, _LARGEST_LOG_SUM).exp().clamp(max=high)[response_X]
    ratio_X = log_ratio_X.exp()
    if kind == "tis":
        return ratio_X.clamp(max=high)
    kept_X = (ratio_X >= low) & (ratio_X <= high)
    return torch.where(kept_X, ratio_X if kind == "icepop" else 1.0, 0.0)
