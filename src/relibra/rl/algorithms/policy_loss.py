"""The policy loss: log-probs, ratios, the clipped surrogate, corrections, divergence, weights of tokens."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.config.settings import AlgorithmSettings

Aggregate = Literal["token", "token_over_step", "response", "constant"]
"""How a mini-batch's loss is averaged over tokens; see `token_weights`."""
Correction = Literal["off", "tis", "sequence_tis", "icepop", "mis"]
"""See `correction_weights`."""
Estimator = Literal["k1", "k2", "k3", "k3+"]
"""See `kl_estimate`."""

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


@dataclass(frozen=True)
class LossSums:
    """Sums over trained tokens; they add up over micro-batches and ranks.

    clipped   tokens whose ratio was clipped
    masked    tokens that the correction gave weight 0
    kl        divergence from the reference policy
    kl_limited   tokens at whose log-ratio the estimate of it has reached its limit (`kl_estimate`)
    """

    loss: float = 0.0
    clipped: float = 0.0
    masked: float = 0.0
    tokens: float = 0.0
    kl: float = 0.0
    kl_limited: float = 0.0

    def __add__(self, other: LossSums) -> LossSums:
        """Return the sums over the tokens of both."""
        return LossSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def policy_loss(
    logits_XV: Float[Tensor, "X V"],
    batch: TokenBatch,
    totals: LossTotals,
    settings: AlgorithmSettings,
    *,
    temperature: float,
    max_response: int,
) -> tuple[Float[Tensor, ""], LossSums]:
    """Return a micro-batch's part of the loss of its mini-batch, and its sums; parts of all ranks add up to the loss.

    loss = - sum over trained tokens of w (c min(r A, clip(r, 1 - low, 1 + high) A) - k KL + e H)
           - p mini_batches / step_positive_tokens x sum over tokens of positive responses of log pi

    with weight w (`token_weights`), correction c (`correction_weights`), ratio r = pi / pi_old of the token or its
    response (`sequence_log_ratio`), advantage A, divergence KL from the reference (`kl_estimate`), entropy H, and the
    coefficients k, e and p of the settings.

    logits_XV   that predict the response tokens; for filler one row, whose backward pass keeps collectives aligned
    """
    if not batch.num_responses:
        return logits_XV.sum() * 0.0, LossSums()
    assert batch.loss_mask_X is not None, "loss_mask_X is filled before the update"
    assert batch.old_log_probs_X is not None, "old_log_probs_X is filled before the update"
    assert batch.advantages_X is not None, "advantages_X is filled before the update"
    mask_X = batch.loss_mask_X
    logp_X = token_log_probs(logits_XV, batch.target_X, temperature)
    response_Y, old_Y = batch.response_X[mask_X], batch.old_log_probs_X[mask_X]  # Y: the trained ones of X
    correction_Y = correction_weights(
        settings.correction,
        old_Y - batch.sampled_log_probs_X[mask_X],
        response_Y,
        batch.num_responses,
        low=settings.correction_low,
        high=settings.correction_high,
    )
    log_ratio_Y = logp_X[mask_X] - old_Y
    if settings.ratio == "sequence":
        log_ratio_Y = sequence_log_ratio(log_ratio_Y, response_Y, batch.num_responses)
    surrogate_Y, clipped_Y = clipped_surrogate(
        log_ratio_Y,
        batch.advantages_X[mask_X],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    weight_Y = token_weights(
        settings.aggregate,
        torch.bincount(response_Y, minlength=batch.num_responses)[response_Y],
        tokens_of_mini_batch=totals.tokens,
        tokens_of_step=totals.step_tokens,
        mini_batches=totals.mini_batches,
        responses_of_mini_batch=totals.responses,
        max_response=max_response,
    )
    gain_Y, kl, limited = correction_Y * surrogate_Y, 0.0, 0.0
    if batch.ref_log_probs_X is not None:
        kl_Y, limited_Y = kl_estimate(settings.kl_estimator, logp_X[mask_X], batch.ref_log_probs_X[mask_X])
        gain_Y = gain_Y - settings.kl_coefficient * kl_Y
        kl, limited = float(kl_Y.detach().sum()), float(limited_Y.sum())
    if settings.entropy_coefficient:
        gain_Y = gain_Y + settings.entropy_coefficient * token_entropy(logits_XV[mask_X], temperature)
    loss = -(weight_Y * gain_Y).sum()
    if settings.positive_coefficient and totals.step_positive_tokens:
        assert batch.positive_B is not None, "positive_B is filled before the update"
        share = totals.mini_batches / totals.step_positive_tokens
        positive_X = batch.positive_B[batch.response_X]
        loss = loss - settings.positive_coefficient * share * (logp_X * positive_X).sum()
    masked = float((correction_Y == 0).sum())
    return loss, LossSums(float(loss.detach()), float(clipped_Y.sum()), masked, float(len(response_Y)), kl, limited)


def token_log_probs(
    logits_XV: Float[Tensor, "X V"], tokens_X: Int[Tensor, " X"], temperature: float
) -> Float[Tensor, " X"]:
    """Return the log-probability of each token, in float32 or better.

    logits_XV     that predict the tokens: those at the positions before them
    temperature   of the policy, as in sampling
    """
    return torch.log_softmax(_tempered(logits_XV, temperature), dim=-1).gather(-1, tokens_X[:, None]).squeeze(-1)


def token_entropy(logits_XV: Float[Tensor, "X V"], temperature: float) -> Float[Tensor, " X"]:
    """Return the entropy of the tempered policy at each position, in nats, in float32 or better."""
    log_probs_XV = torch.log_softmax(_tempered(logits_XV, temperature), dim=-1)
    return -(log_probs_XV.exp() * log_probs_XV).sum(-1)


def sequence_log_ratio(
    log_ratio_X: Float[Tensor, " X"], response_X: Int[Tensor, " X"], num_responses: int
) -> Float[Tensor, " X"]:
    """Return for each token the mean log-ratio of its response, with the gradient of the token's own.

    GSPO, arXiv 2507.18071: the ratio of section 4.1 in the token-level form of section 4.3, sg[s] pi / sg[pi].

    log_ratio_X   log-probs now minus those of the old policy
    response_X    index of each token's response, 0 .. num_responses - 1; all its trained tokens must be here
    """
    value_X = log_ratio_X.detach()
    size_S = torch.bincount(response_X, minlength=num_responses).clamp(min=1)
    mean_S = value_X.new_zeros(num_responses).index_add(0, response_X, value_X) / size_S
    return mean_S[response_X] + (log_ratio_X - value_X)


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
    aggregate: Aggregate,
    tokens_of_response_X: Int[Tensor, " X"],
    *,
    tokens_of_mini_batch: int,
    tokens_of_step: int,
    mini_batches: int,
    responses_of_mini_batch: int,
    max_response: int,
) -> Float[Tensor, " X"]:
    """Return the weight of each token: the loss of a mini-batch is minus the sum of weight x surrogate.

    token             mean over the tokens of the mini-batch: DAPO, arXiv 2503.14476, eq. 12
    token_over_step   the same with the mean number of tokens of the step's mini-batches, so that every token of a step
                      weighs the same: VAPO, arXiv 2504.05118
    response          mean over responses of their means: GRPO, arXiv 2402.03300, eq. 3
    constant          mean over responses of their sums / max_response: Dr. GRPO, arXiv 2503.20783

    tokens_of_response_X   trained tokens of the response that each token belongs to
    All counts are of trained tokens, and of responses that have some, over all ranks.
    """
    if aggregate == "response":
        return 1 / (tokens_of_response_X.float() * max(1, responses_of_mini_batch))
    weight = {
        "token": 1 / max(1, tokens_of_mini_batch),
        "token_over_step": mini_batches / max(1, tokens_of_step),
        "constant": 1 / (max_response * max(1, responses_of_mini_batch)),
    }[aggregate]
    return torch.full(tokens_of_response_X.shape, weight, device=tokens_of_response_X.device)


def _tempered(logits_XV: Tensor, temperature: float) -> Tensor:
    logits_XV = logits_XV.float() if logits_XV.dtype in (torch.bfloat16, torch.float16) else logits_XV
    return logits_XV if temperature == 1 else logits_XV / temperature  # a copy of the logits is large


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
    to 10, as in verl, and limited tokens have no gradient.
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
