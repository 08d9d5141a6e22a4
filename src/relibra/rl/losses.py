"""Losses and distances between policies, token by token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def token_log_probs(
    logits_BNV: Float[Tensor, "B N V"], tokens_BN: Int[Tensor, "B N"], temperature: float
) -> Float[Tensor, "B N"]:
    """Return the log-probability of each token given those before it; column 0, which nothing predicts, is 0.

    logits_BNV    column t predicts token t + 1
    temperature   of the policy, as in sampling
    """
    scaled = logits_BNV[:, :-1].float() / temperature
    picked = torch.log_softmax(scaled, dim=-1).gather(-1, tokens_BN[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(picked, (1, 0))


def clipped_policy_loss(
    logp_BN: Float[Tensor, "B N"],
    logp_old_BN: Float[Tensor, "B N"],
    advantage_B: Float[Tensor, " B"],
    mask_BN: Bool[Tensor, "B N"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, ""]:
    """Sum the clipped surrogate over masked tokens: -min(r A, clip(r, 1 - low, 1 + high) A).

    PPO, arXiv 1707.06347, eq. 7, with the two bounds of DAPO, arXiv 2503.14476. It is a sum, so that the caller can
    divide by the tokens of the whole mini-batch however it is cut into micro-batches.
    """
    ratio_BN = torch.exp(torch.where(mask_BN, logp_BN - logp_old_BN, 0.0))
    advantage_B1 = advantage_B[:, None]
    surrogate_BN = torch.minimum(ratio_BN * advantage_B1, ratio_BN.clamp(1 - clip_low, 1 + clip_high) * advantage_B1)
    return -(surrogate_BN * mask_BN).sum()


def k3_divergence(difference: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp(d) - 1 - d for d = log-prob here - log-prob of the sampler; its mean estimates KL(sampler, here).

    Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    return torch.expm1(difference) - difference
