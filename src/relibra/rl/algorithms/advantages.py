"""Advantages of tokens and responses over a baseline: GAE, its extension to windows, groups."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64, Int, Real
from torch import Tensor

_VARIANCE_EPSILON = 1e-8
"""Added to the variance that `whiten` divides by."""


def egae(
    values_BN: Float[Tensor, "B N"],
    rewards_BN: Float[Tensor, "B N"],
    length_B: Int[Tensor, " B"],
    finished_B: Bool[Tensor, " B"],
    *,
    gamma: float,
    lambda_B: Float[Tensor, " B"],
) -> Float[Tensor, "B N"]:
    """Estimate the advantage of the tokens of a window, whether its response goes on after it or not.

    Extended GAE of T-PPO, arXiv 2506.15050. For a finished response it is GAE (arXiv 1506.02438, eq. 16), to the bit.
    The sum of residuals ends with the window. After the last token of an unfinished response, the value is taken to be
    the one before that token, so that at gamma 1 the token's advantage is its reward.

    values_BN    value before each token: a row per window, a column per token
    rewards_BN   for each token of the window
    length_B     tokens of each window; columns beyond are ignored, and 0 in the result
    """
    column_1N = torch.arange(values_BN.shape[1], device=length_B.device).unsqueeze(0)
    inside_BN, last_BN = column_1N < length_B[:, None], column_1N == length_B[:, None] - 1
    after_window_BN = torch.where(finished_B[:, None], 0.0, values_BN)
    following_BN = torch.where(last_BN, after_window_BN, values_BN.roll(-1, dims=1))
    residual_BN = torch.where(inside_BN, rewards_BN + gamma * following_BN - values_BN, 0.0)
    return _discounted_suffix_sums(residual_BN, gamma * lambda_B)


def length_adaptive_lambda(length_B: Real[Tensor, " B"], *, alpha: float, floor: float) -> Float[Tensor, " B"]:
    """Return 1 - 1 / (alpha x length), at least `floor`: lambdas whose sums reach over a share alpha of each response.

    VAPO, arXiv 2504.05118; the floor is T-PPO's, arXiv 2506.15050.

    >>> length_adaptive_lambda(torch.tensor([100, 8192]), alpha=0.05, floor=0.95)
    tensor([0.9500, 0.9976])
    """
    return (1 - 1 / (alpha * length_B.float())).clamp(min=floor)


def group_advantages(
    rewards_S: Float[Tensor, " S"], group_S: Int[Tensor, " S"], *, divide_by_std: bool = True
) -> Float[Tensor, " S"]:
    """Return (reward - mean) / (standard deviation + 1e-6) of each response within its group.

    GRPO, arXiv 2402.03300, section 4.1.1; without the division Dr. GRPO, arXiv 2503.20783. Where the rewards
    of a group are all equal, advantages are 0.

    group_S   group of each response, any integers; all responses of a group must be here

    >>> advantages = group_advantages(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([5, 5, 8]))
    >>> [round(advantage, 4) for advantage in advantages.tolist()]
    [0.7071, -0.7071, 0.0]
    """
    index_S, num_groups = _groups(group_S)
    size_X = torch.bincount(index_S, minlength=num_groups)
    mean_X = rewards_S.new_zeros(num_groups).index_add(0, index_S, rewards_S) / size_X
    # Where all are equal, the mean has a rounding error, which the division would enlarge.
    centred_S = torch.where(mixed_groups(rewards_S, group_S), rewards_S - mean_X[index_S], 0.0)
    if not divide_by_std:
        return centred_S
    variance_X = rewards_S.new_zeros(num_groups).index_add(0, index_S, centred_S.square()) / (size_X - 1).clamp(min=1)
    return centred_S / (variance_X.sqrt()[index_S] + 1e-6)


def mixed_groups(rewards_S: Float[Tensor, " S"], group_S: Int[Tensor, " S"]) -> Bool[Tensor, " S"]:
    """Return the mask of responses in groups whose rewards differ; the others have advantage 0.

    Dynamic sampling of DAPO, arXiv 2503.14476, eq. 11, for any rewards.
    """
    index_S, num_groups = _groups(group_S)
    lowest_X = rewards_S.new_full((num_groups,), torch.inf).scatter_reduce(0, index_S, rewards_S, "amin")
    highest_X = rewards_S.new_full((num_groups,), -torch.inf).scatter_reduce(0, index_S, rewards_S, "amax")
    return (lowest_X < highest_X)[index_S]


def moments(x_BN: Float[Tensor, "B N"], mask_BN: Bool[Tensor, "B N"]) -> Float64[Tensor, " 3"]:
    """Return count, sum and sum of squares of the entries in the mask; they add up over ranks."""
    chosen = x_BN[mask_BN].double()
    return torch.stack([mask_BN.sum().double(), chosen.sum(), chosen.square().sum()])


def whiten(
    x_BN: Float[Tensor, "B N"], mask_BN: Bool[Tensor, "B N"], moments: Float64[Tensor, " 3"]
) -> Float[Tensor, "B N"]:
    """Return x shifted and scaled by its moments to mean 0 and variance 1; 0 outside of the mask."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    whitened_BN = (x_BN.double() - mean) * (variance + _VARIANCE_EPSILON).rsqrt()
    return torch.where(mask_BN, whitened_BN, 0.0).to(x_BN.dtype)


def _discounted_suffix_sums(x_BN: Tensor, decay_B: Tensor) -> Tensor:
    """Return y with y[:, t] = x[:, t] + decay y[:, t + 1]."""
    sums_BN = torch.empty_like(x_BN)
    following_B = torch.zeros_like(x_BN[:, 0])
    for t in reversed(range(x_BN.shape[1])):
        following_B = x_BN[:, t] + decay_B * following_B
        sums_BN[:, t] = following_B
    return sums_BN


def _groups(group_S: Tensor) -> tuple[Tensor, int]:
    """Return the group of each response, numbered from 0, and the number of groups."""
    _, index_S = torch.unique(group_S, return_inverse=True)
    return index_S, int(index_S.max()) + 1 if len(index_S) else 0
