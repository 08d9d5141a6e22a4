"""T-PPO, arXiv 2506.15050: PPO on windows. Lambda, clips and the loss on positive examples are VAPO's, 2504.05118."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relibra.rl.algorithms import ppo

if TYPE_CHECKING:
    from relibra.rl.algorithms.terms import LossInputs, LossResult

SETTINGS: dict[str, Any] = {
    **ppo.SETTINGS,
    "lambda_policy": "length_adaptive",
    "loss": "tppo",
    "clip_high": 0.28,
    "dual_clip": 10.0,
}
POSITIVE_WEIGHT = 0.1
"""Weight of the language-model loss on finished responses with a positive reward."""


def choose_window(max_response: int) -> int | None:
    """Return a window for T-PPO: the divisor of `max_response` nearest to a quarter of it, or None.

    A window has at least two tokens and at most half of `max_response`; None: no divisor fits. Ties: the smaller one.
    """
    divisors = [window for window in range(2, max_response // 2 + 1) if max_response % window == 0]
    return min(divisors, key=lambda window: (abs(4 * window - max_response), window), default=None)


def loss(inputs: LossInputs) -> LossResult:
    """Return PPO's loss - p x mini_batches / step_positive_tokens x (sum of log pi over tokens of positive responses).

    p is POSITIVE_WEIGHT.
    """
    total, metrics = ppo.loss(inputs)
    totals = inputs.totals
    if totals.step_positive_tokens:
        share = totals.mini_batches / totals.step_positive_tokens
        positive = (inputs.log_probs_X * inputs.positive_X).sum()
        total = total - POSITIVE_WEIGHT * share * positive
    return total, metrics
