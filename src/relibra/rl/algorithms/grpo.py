"""GRPO, arXiv 2402.03300: PPO's loss with advantages within groups, and a mean over responses; no value model.

`loss` is that of `ppo.py`. With `kl_coefficient` it has the divergence from the reference of its eq. 4.
"""

from __future__ import annotations

from typing import Any

from relibra.rl.algorithms.ppo import loss as loss

SETTINGS: dict[str, Any] = {
    "divide_by_std": True,
    "loss": "grpo",
    "aggregate": "response",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "correction": "tis",
}
