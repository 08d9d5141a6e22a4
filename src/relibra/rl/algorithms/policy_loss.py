"""The policy's loss: log-probs, ratios per token or response, the clipped surrogate, and what each token weighs."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregate = Literal["token", "token_over_step", "response", "constant"]
"""How tokens make up the loss of a mini-batch; see `token_weights`."""

_LARGEST_LOG_RATIO = 20.0
"""Log-ratios are cut here, so that no exponential overflows: 0 x infinity is no gradient."""


def token_log_probs(
    logits_XV: Float[Tensor, "X V"], tokens_X: Int[Tensor, " X"], temperature: float
) -> Float[Tensor, " X"]:
    """Return the log-probability of each token, in float32 or better.

    logits_XV     that predict the tokens: those of the places before them
    temperature   of the policy, as in sampling
    """
    return torch.log_softmax(_tempered(logits_XV, temperature), dim=-1).gather(-1, tokens_X[:, None]).squeeze(-1)


def token_entropy(logits_XV: Float[Tensor, "X V"], temperature: float) -> Float[Tensor, " X"]:
    """Return the entropy of the tempered policy at each place, in nats and in float32 or better."""
    log_probs_XV = torch.log_softmax(_tempered(logits_XV, temperature), dim=-1)
    return -(log_probs_XV.exp() * log_probs_XV).sum(-1)


def sequence_log_ratio(
    log_ratio_X: Float[Tensor, " X"], response_X: Int[Tensor, " X"], num_responses: int
) -> Float[Tensor, " X"]:
    """Give every token the mean log-ratio of its response, and the gradient of its own.

    GSPO, arXiv 2507.18071: the ratio of section 4.1 in the token-level form of section 4.3, sg[s] pi / sg[pi].

    log_ratio_X   log-probs now minus those of the old policy
    response_X    place of each token's response, 0 .. num_responses - 1; all its trained tokens must be here
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
    """Return what is maximised, min(r A, clip(r, 1 - low, 1 + high) A), and where a clip took hold.

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
    """Return what each token weighs: the loss of a mini-batch is minus the sum of weight x surrogate.

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
