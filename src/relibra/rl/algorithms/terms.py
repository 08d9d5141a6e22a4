"""Inputs and terms of policy losses: ratios, the clipped surrogate, corrections, divergence, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxtyping import Bool, Float, Int

from relibra.errors import missing_packages
from relibra.rl.config.settings import Aggregate, AlgorithmSettings, Estimator

with missing_packages("relibra.rl.algorithms"):
    import torch
    from torch import Tensor

_LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, so that no exponential overflows: 0 x infinity has no gradient."""
_LARGEST_K3 = 10.0
"""Largest estimate of the divergence of one token."""


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """Counts over all ranks that a mini-batch's loss is divided by, so that the cut into micro-batches changes nothing.

    tokens, responses, positive_tokens   of the mini-batch: trained tokens, responses with a trained token, and response
                                         tokens of positive responses
    step_tokens, step_positive_tokens    the same of all mini-batches of the step
    mini_batches                         of the step
    """

    tokens: int
    responses: int
    positive_tokens: int
    step_tokens: int
    step_positive_tokens: int
    mini_batches: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """Input of a policy loss: X response tokens of a micro-batch, and what their loss is divided by.

    The tokens are those to train on; a loss that reads `positive_X` (T-PPO's or the user's) also gets all tokens of
    positive responses.

    log_probs_X           of the tokens, with gradients
    entropy_X             of the policy at each token, in nats, with gradients
    old_log_probs_X       of the old policy, by `algorithm.old_log_probs`; those of the first mini-batch may be
                          `log_probs_X` itself, without gradients. 0 where not in the mask
    sampled_log_probs_X   as the sampler computed them
    ref_log_probs_X       under the reference policy, 0 where not in the mask; None: `kl_coefficient` is 0
    advantages_X          0 where not in the mask
    mask_X                tokens to train on
    trained_Y             index of those among the X tokens
    versions_X            of the weights that sampled them
    response_X            response of each, 0 .. num_responses - 1
    positive_X            tokens of finished responses with a task reward above 0
    totals                counts over all micro-batches and ranks
    temperature           of the policy
    max_response          most tokens of a response
    """

    log_probs_X: Float[Tensor, " X"]
    entropy_X: Float[Tensor, " X"]
    old_log_probs_X: Float[Tensor, " X"]
    sampled_log_probs_X: Float[Tensor, " X"]
    ref_log_probs_X: Float[Tensor, " X"] | None
    advantages_X: Float[Tensor, " X"]
    mask_X: Bool[Tensor, " X"]
    trained_Y: Int[Tensor, " Y"]
    versions_X: Int[Tensor, " X"]
    response_X: Int[Tensor, " X"]
    positive_X: Bool[Tensor, " X"]
    num_responses: int
    totals: LossTotals
    settings: AlgorithmSettings
    temperature: float
    max_response: int

    def trained(self) -> LossInputs:
        """Return the inputs of the tokens to train on alone. An index by the mask would wait for the device."""
        if len(self.trained_Y) == len(self.mask_X):
            return self
        of_tokens = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_X")}
        picked: dict[str, Any] = {
            name: value.index_select(0, self.trained_Y) for name, value in of_tokens.items() if value is not None
        }
        return replace(self, trained_Y=torch.arange(len(self.trained_Y), device=self.trained_Y.device), **picked)


LossResult = tuple[Float[Tensor, ""], Mapping[str, Tensor | float]]
"""A micro-batch's part of the loss of its mini-batch, to which all parts add up; and sums over trained tokens by name,
whose means per trained token are logged."""


def sequence_log_ratio(
    log_ratio_X: Float[Tensor, " X"], response_X: Int[Tensor, " X"], num_responses: int
) -> Float[Tensor, " X"]:
    """Return for each token the mean log-ratio of its response, with the gradient of the token's own.

    GSPO, arXiv 2507.18071: the ratio of section 4.1 in the token-level form of section 4.3, sg[s] pi / sg[pi].

    log_ratio_X   log-probs now minus those of the old policy
    response_X    index of each token's response, 0 .. num_responses - 1; all its trained tokens must be here
    """
    value_X = log_ratio_X.detach()
    sum_S = value_X.new_zeros(num_responses).index_add(0, response_X, value_X)
    return sum_S[response_X] / response_sizes(response_X, num_responses) + (log_ratio_X - value_X)


def response_sizes(response_X: Int[Tensor, " X"], num_responses: int) -> Int[Tensor, " X"]:
    """Return for each token how many of these tokens its response has; `bincount` would wait for the device."""
    size_S = response_X.new_zeros(num_responses).index_add(0, response_X, torch.ones_like(response_X))
    return size_S[response_X]


def clipped_surrogate(
    log_ratio_X: Float[Tensor, " X"],
    advantage_X: Float[Tensor, " X"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Float[Tensor, " X"], Bool[Tensor, " X"]]:
    """Return the clipped objective, min(r A, clip(r, 1 - low, 1 + high) A), and where it is clipped.

    PPO, arXiv 1707.06347, eq. 7, with the two bounds of DAPO, arXiv 2503.14476, eq. 10. Where the advantage is
    negative, a dual clip c keeps the result at c A or above: arXiv 1912.09729.

    log_ratio_X   log of the ratio of the policy now to the old one, of the token or its response
    dual_clip     above 1, or 0 for none
    """
    ratio_X = log_ratio_X.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    plain_X = ratio_X * advantage_X
    surrogate_X = torch.minimum(plain_X, ratio_X.clamp(1 - clip_low, 1 + clip_high) * advantage_X)
    if dual_clip:
        floored_X = torch.maximum(surrogate_X, dual_clip * advantage_X)
        surrogate_X = torch.where(advantage_X < 0, floored_X, surrogate_X)
    return surrogate_X, (surrogate_X != plain_X).detach()


def token_weights(
    aggregate: Aggregate, tokens_of_response_X: Int[Tensor, " X"], totals: LossTotals, max_response: int
) -> Float[Tensor, " X"]:
    """Return the weight of each token: the loss of a mini-batch is minus the sum of weight x surrogate.

    token             mean over the tokens of the mini-batch: DAPO, arXiv 2503.14476, eq. 12
    token_over_step   the same with the mean number of tokens of the step's mini-batches, so that every token of a step
                      weighs the same: VAPO, arXiv 2504.05118
    response          mean over responses of their means: GRPO, arXiv 2402.03300, eq. 3
    constant          mean over responses of their sums / max_response: Dr. GRPO, arXiv 2503.20783

    tokens_of_response_X   trained tokens of the response that each token belongs to
    """
    if aggregate == "response":
        return 1 / (tokens_of_response_X.float() * max(1, totals.responses))
    weight = {
        "token": 1 / max(1, totals.tokens),
        "token_over_step": totals.mini_batches / max(1, totals.step_tokens),
        "constant": 1 / (max_response * max(1, totals.responses)),
    }[aggregate]
    return torch.full(tokens_of_response_X.shape, weight, device=tokens_of_response_X.device)


def correction_weights(
    settings: AlgorithmSettings, log_ratio_X: Float[Tensor, " X"], response_X: Int[Tensor, " X"], num_responses: int
) -> Float[Tensor, " X"]:
    """Return a weight for the surrogate of each token, without gradient; k = probability by trainer / by sampler.

    With low 0.5 and high 2; for icepop high is 5, as in its paper:

    off            1
    tis            min(k, high): truncated importance sampling
    sequence_tis   the same with the product of k over the response
    icepop         k within low .. high, else 0: IcePop, arXiv 2510.18855
    mis            1 within low .. high, else 0: other tokens are rejected, none is reweighted

    log_ratio_X    log-probs by the trainer, at the parameters that sampled, minus those by the sampler
    response_X     index of each token's response, 0 .. num_responses - 1
    """
    log_ratio_X, kind = log_ratio_X.detach(), settings.correction
    low, high = 0.5, 5.0 if kind == "icepop" else 2.0
    if kind == "off":
        return torch.ones_like(log_ratio_X)
    if kind == "sequence_tis":
        sum_S = log_ratio_X.new_zeros(num_responses).index_add(0, response_X, log_ratio_X)
        return sum_S.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp().clamp(max=high)[response_X]
    ratio_X = log_ratio_X.exp()
    if kind == "tis":
        return ratio_X.clamp(max=high)
    kept_X = (ratio_X >= low) & (ratio_X <= high)
    return torch.where(kept_X, ratio_X if kind == "icepop" else 1.0, 0.0)


def kl_estimate(
    kind: Estimator, logp_X: Float[Tensor, " X"], logp_reference_X: Float[Tensor, " X"]
) -> tuple[Float[Tensor, " X"], Bool[Tensor, " X"]]:
    """Return estimates of KL(policy, reference) per token, to be minimised, and which of them are limited.

    Schulman, "Approximating KL divergence" (2020), with d = logp - logp of the reference:

    k1   d, which may be negative; unbiased
    k2   d^2 / 2, never negative; slightly biased
    k3   exp(-d) - 1 + d, never negative; unbiased. GRPO's, arXiv 2402.03300, eq. 4
    k3+  the value of k3 with the gradient of k2

    In expectation, the gradient of k2 is that of KL(policy, reference); that of k3 is that of KL(reference, policy),
    large where the reference is much likelier. That of k1 itself is 0 in expectation, so k1 has the gradient of k2.

    One token that the reference has and the policy has lost would outweigh all others: d counts up to 20 in size, k3 up
    to 10, as in verl. Limited tokens have no gradient; with k3+ those where k3 alone is limited keep theirs.
    """
    difference_X = logp_X - logp_reference_X
    limited_X = difference_X.detach().abs() > _LARGEST_LOG_RATIO
    difference_X = difference_X.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    half_square_X = difference_X.square() / 2
    if kind == "k2":
        return half_square_X, limited_X
    if kind == "k1":
        return difference_X.detach() + (half_square_X - half_square_X.detach()), limited_X
    k3_X = torch.expm1(-difference_X) + difference_X
    limited_X |= k3_X.detach() > _LARGEST_K3
    k3_X = k3_X.clamp(max=_LARGEST_K3)
    if kind == "k3":
        return k3_X, limited_X
    return k3_X.detach() + (half_square_X - half_square_X.detach()), limited_X
