"""Defaults of the published algorithms and of the built-in model; `run_config.resolve` fills them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relibra.rl.algorithms import dapo, grpo, gspo, ppo, tppo

PRESETS: dict[str, dict[str, Any]] = {one.SETTINGS["loss"]: one.SETTINGS for one in (ppo, tppo, grpo, dapo, gspo)}
"""Published algorithms as values of `AlgorithmSettings`. They set no sizes or learning rates."""

BUILT_IN_MODEL: Mapping[str, Mapping[str, Any]] = {
    "model": {"dtype": "float32"},
    "warmup": {"steps": 320},  # its weights are random: RL needs a policy that earns some rewards
    "rollout": {"max_response": 80},
    "update": {"learning_rate": 2e-4, "activations": "keep"},
    "critic": {"learning_rate": 1e-3},
}
"""Defaults by section that differ from those of a model of your own; its sizes are those of `ModelSettings`."""
