"""GSPO, arXiv 2507.18071: GRPO with one ratio per response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relibra.rl.algorithms import grpo

if TYPE_CHECKING:
    from relibra.rl.algorithms.terms import LossInputs, LossResult

SETTINGS: dict[str, Any] = {**grpo.SETTINGS, "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}


def loss(inputs: LossInputs) -> LossResult:
    """Return GRPO's loss with the ratio of the response of each token (`sequence_log_ratio`)."""
    from relibra.rl.algorithms.terms import sequence_log_ratio

    inputs = inputs.trained()
    log_ratio_X = inputs.log_probs_X - inputs.old_log_probs_X
    return grpo.loss(inputs, sequence_log_ratio(log_ratio_X, inputs.response_X, inputs.num_responses))
