"""Divergence from a reference policy, estimated from tokens that the trained policy sampled."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
"""See `kl_estimate`."""


def kl_estimate(
    kind: Estimator, logp_X: Float[Tensor, " X"], logp_reference_X: Float[Tensor, " X"]
) -> Float[Tensor, " X"]:
    """Return estimates of KL(policy, reference) per token, to be minimised.

    Schulman, "Approximating KL divergence" (2020), with d = logp - logp of the reference:

    k1   d, which may be negative; unbiased
    k2   d^2 / 2, never negative; slightly biased
    k3   exp(-d) - 1 + d, never negative; unbiased. GRPO's, arXiv 2402.03300, eq. 4

    In expectation, the gradient of k2 is that of KL(policy, reference); that of k3 is that of KL(reference, policy),
    large where the reference is much likelier. That of k1 itself is 0 in expectation, so k1 has the gradient of k2.
    """
    difference_X = logp_X - logp_reference_X
    if kind == "k3":
        return torch.expm1(-difference_X) + difference_X
    half_square_X = difference_X.square() / 2
    if kind == "k2":
        return half_square_X
    return difference_X.detach() + (half_square_X - half_square_X.detach())
