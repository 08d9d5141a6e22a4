"""Advantages: how much better a response was than could be expected."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_advantages(rewards_B: Float[Tensor, " B"], group_B: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Compare each response with its group: (reward - mean) / (standard deviation + 1e-6).

    GRPO, arXiv 2402.03300, section 4.1.1. A group whose rewards are all equal teaches nothing: advantage 0.

    group_B   group of each response, any integers; all responses of a group must be here

    >>> advantages = group_advantages(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([5, 5, 8]))
    >>> [round(advantage, 4) for advantage in advantages.tolist()]
    [0.7071, -0.7071, 0.0]
    """
    _, index_B = torch.unique(group_B, return_inverse=True)
    num_groups = int(index_B.max()) + 1 if len(index_B) else 0
    size_G = torch.bincount(index_B, minlength=num_groups)
    mean_G = torch.zeros(num_groups).index_add(0, index_B, rewards_B) / size_G
    centred_B = rewards_B - mean_G[index_B]
    variance_G = torch.zeros(num_groups).index_add(0, index_B, centred_B.square()) / (size_G - 1).clamp(min=1)
    return centred_B / (variance_G.sqrt()[index_B] + 1e-6)
