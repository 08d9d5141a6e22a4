"""Generalized advantage estimation of finished responses, to compare that of windows with."""

import torch


def gae(values_BN, rewards_BN, length_B, *, gamma, lambda_B):
    """Estimate the advantage of every token of finished responses; the value after the last one is 0.

    GAE, arXiv 1506.02438, eq. 16. Columns beyond the length of a response are ignored, and 0 in the result.
    """
    column_1N = torch.arange(values_BN.shape[1])[None]
    following_BN = torch.nn.functional.pad(values_BN[:, 1:], (0, 1))
    following_BN = torch.where(column_1N == length_B[:, None] - 1, 0.0, following_BN)
    residual_BN = torch.where(column_1N < length_B[:, None], rewards_BN + gamma * following_BN - values_BN, 0.0)
    advantage_BN, after_B = torch.empty_like(residual_BN), torch.zeros_like(residual_BN[:, 0])
    for t in reversed(range(residual_BN.shape[1])):
        after_B = residual_BN[:, t] + gamma * lambda_B * after_B
        advantage_BN[:, t] = after_B
    return advantage_BN
