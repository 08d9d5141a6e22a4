"""Presets: published algorithms as values of `AlgorithmSettings`. They set no sizes or learning rates."""

from __future__ import annotations

from typing import Any

_PPO: dict[str, Any] = {
    "advantage": "gae",
    "lambda_mode": "fixed",
    "whiten": True,
    "ratio": "token",
    "aggregate": "token_over_step",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "correction": "tis",
}
_GRPO: dict[str, Any] = {
    "advantage": "group",
    "divide_by_std": True,
    "ratio": "token",
    "aggregate": "response",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "correction": "tis",
}

_LARGEST_TAIL_DROP = 8
VALUE_WARMUP_STEPS, VALUE_WARMUP_FINISHED = 10, 64


def choose_window(max_response: int) -> int | None:
    """Return a window for T-PPO: the divisor of `max_response` nearest to a quarter of it; None: it has none.

    At least two tokens and at most half of a response; ties: the smaller one.
    """
    divisors = [window for window in range(2, max_response // 2 + 1) if max_response % window == 0]
    return min(divisors, key=lambda window: (abs(4 * window - max_response), window), default=None)


def choose_tail_drop(window: int) -> int:
    """Return how many last tokens of a window do not train the policy: a quarter of it, and at most eight."""
    return min(_LARGEST_TAIL_DROP, window // 4)


def choose_value_warmup(max_windows: int, responses_per_step: int) -> dict[str, Any]:
    """Return the warm-up of the value model of presets ppo and tppo: settings of `CriticSettings`.

    The policy waits for ten steps, and for as many as a response has windows: then every response of the first step has
    ended. A value update takes 64 finished responses, or all of a step where it has fewer.
    """
    return {
        "pretrain_steps": max(VALUE_WARMUP_STEPS, max_windows),
        "min_finished": min(VALUE_WARMUP_FINISHED, responses_per_step),
        "explained_variance_gate": 0.0,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 1707.06347
    "ppo": _PPO,
    # arXiv 2506.15050; lambda, clips and the loss on positive examples as in VAPO, arXiv 2504.05118
    "tppo": {
        **_PPO,
        "lambda_mode": "length_adaptive",
        "bootstrap": "hold",
        "clip_high": 0.28,
        "dual_clip": 10.0,
        "positive_coefficient": 0.1,
    },
    # arXiv 2402.03300
    "grpo": _GRPO,
    # arXiv 2503.14476; the length penalty depends on the lengths of the run: set overlong_buffer
    "dapo": {**_GRPO, "aggregate": "token", "clip_high": 0.28, "group_filter": "mixed"},
    # arXiv 2507.18071
    "gspo": {**_GRPO, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
