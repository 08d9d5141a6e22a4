"""DAPO, arXiv 2503.14476: GRPO with a mean over tokens, a higher upper clip, and only groups whose rewards differ.

The length penalty depends on the lengths of the run: set `overlong_buffer`.
"""

from __future__ import annotations

from typing import Any

from relibra.rl.algorithms import grpo
from relibra.rl.algorithms.grpo import loss as loss

SETTINGS: dict[str, Any] = {
    **grpo.SETTINGS,
    "loss": "dapo",
    "aggregate": "token",
    "clip_high": 0.28,
    "group_filter": "mixed",
}
