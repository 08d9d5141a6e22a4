"""The value loss, and metrics of the value model: explained variance and AUROC."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from numpy import ndarray
from torch import Tensor

_NO_SPREAD = 1e-12
"""Returns whose variance is below this share of their mean square count as equal."""


def clipped_value_loss(
    value_X: Float[Tensor, " X"],
    old_value_X: Float[Tensor, " X"],
    return_X: Float[Tensor, " X"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " X"]:
    """Return the squared error of each value, or of the value clipped to old - low .. old + high where that is larger.

    A value that has moved beyond the clip towards its return has gradient 0. PPO's value clip with the two bounds of
    T-PPO, arXiv 2506.15050.

    old_value_X   of the value model when the token was sampled; nan: not recorded, so there is no clip
    """
    old_value_X = torch.where(old_value_X.isnan(), value_X.detach(), old_value_X)
    clipped_X = torch.minimum(torch.maximum(value_X, old_value_X - clip_low), old_value_X + clip_high)
    return torch.maximum((value_X - return_X).square(), (clipped_X - return_X).square())


def value_sums(value_X: Float[Tensor, " X"], return_X: Float[Tensor, " X"]) -> Float64[Tensor, " 5"]:
    """Return the count, then sum and sum of squares of returns, then of errors, for `explained_variance`.

    They add up over micro-batches and ranks.
    """
    return_X = return_X.double()
    error_X = return_X - value_X.double()
    count = torch.tensor(float(len(return_X)), dtype=torch.float64, device=return_X.device)
    return torch.stack([count, return_X.sum(), return_X.square().sum(), error_X.sum(), error_X.square().sum()]).detach()


def explained_variance(sums: Float64[Tensor, " 5"]) -> float:
    """Return 1 - variance of the errors / variance of the returns; nan where the returns do not vary.

    1 is a perfect value model; a constant has 0, and below 0 the model adds noise to the advantages.
    """
    count, returns, squared_returns, errors, squared_errors = sums.tolist()
    if not count:
        return float("nan")
    variance = squared_returns / count - (returns / count) ** 2
    if variance <= _NO_SPREAD * squared_returns / count:
        return float("nan")
    return 1 - (squared_errors / count - (errors / count) ** 2) / variance


def auroc(score_S: Float[ndarray, " S"], correct_S: Bool[ndarray, " S"]) -> float:
    """Return the share of (correct, wrong) pairs where the correct response has the higher score; a tie counts half.

    The area under the ROC curve, as the rank statistic of Mann and Whitney; nan without responses of either kind.

    >>> auroc(np.array([0.9, 0.4, 0.4]), np.array([True, True, False]))
    0.75
    """
    right = int(correct_S.sum())
    wrong = len(correct_S) - right
    if not right or not wrong:
        return float("nan")
    _, place_S, count_X = np.unique(score_S, return_inverse=True, return_counts=True)
    rank_X = np.cumsum(count_X) - (count_X - 1) / 2  # equal scores share the mean of their ranks
    return float((rank_X[place_S][correct_S].sum() - right * (right + 1) / 2) / (right * wrong))
