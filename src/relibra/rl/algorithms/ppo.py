"""PPO, arXiv 1707.06347: advantages from a value model, clipped ratio of every token. Other losses are variations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from relibra.rl.algorithms.terms import LossInputs, LossResult

SETTINGS: dict[str, Any] = {
    "lambda_policy": 0.95,
    "whiten": True,
    "loss": "ppo",
    "aggregate": "token_over_step",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "correction": "tis",
}


def loss(inputs: LossInputs, log_ratio_Y: Tensor | None = None) -> LossResult:
    """Return the loss and its metrics.

    Loss: minus the sum over trained tokens of w (c min(r A, clip(r, 1 - low, 1 + high) A) - k KL + e H), with weight w
    (`token_weights`), correction c (`correction_weights`), ratio r = pi / pi_old, advantage A, divergence KL from the
    reference (`kl_estimate`), entropy H, and the coefficients k and e of the settings.

    log_ratio_Y   log r of each trained token; None: its log-prob minus its old one
    """
    import torch

    from relibra.rl.algorithms import terms  # imports torch, which settings do without

    settings, inputs = inputs.settings, inputs.trained()  # from here on its X tokens are the Y trained ones
    old_Y = inputs.old_log_probs_X
    mismatch_Y, response_Y, num_responses = old_Y - inputs.sampled_log_probs_X, inputs.response_X, inputs.num_responses
    correction_Y = terms.correction_weights(settings, mismatch_Y, response_Y, num_responses)
    if settings.old_log_probs == "sampler" and settings.correction in ("icepop", "mis"):
        # Where the old policy is the sampler, r corrects already: IcePop and MIS only mask, by pi / sampler.
        now_Y = inputs.log_probs_X - inputs.sampled_log_probs_X
        kept_Y = terms.correction_weights(settings, now_Y, response_Y, num_responses) > 0
        correction_Y = torch.where(mismatch_Y == 0, kept_Y.to(correction_Y.dtype), correction_Y)
    surrogate_Y, clipped_Y = terms.clipped_surrogate(
        inputs.log_probs_X - old_Y if log_ratio_Y is None else log_ratio_Y,
        inputs.advantages_X,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    tokens_Y = terms.response_sizes(response_Y, num_responses)
    weight_Y = terms.token_weights(settings.aggregate, tokens_Y, inputs.totals, inputs.max_response)
    gain_Y = correction_Y * surrogate_Y
    metrics = {"clip_fraction": clipped_Y.sum(), "masked_fraction": (correction_Y == 0).sum()}
    if inputs.ref_log_probs_X is not None:
        kl_Y, limited_Y = terms.kl_estimate(settings.kl_estimator, inputs.log_probs_X, inputs.ref_log_probs_X)
        gain_Y = gain_Y - settings.kl_coefficient * kl_Y
        metrics |= {"reference_kl": kl_Y.detach().sum(), "reference_kl_limited": limited_Y.sum()}
    if settings.entropy_coefficient:
        gain_Y = gain_Y + settings.entropy_coefficient * inputs.entropy_X
    return -(weight_Y * gain_Y).sum(), metrics
