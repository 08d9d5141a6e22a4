"""Defaults of the built-in small model, where they differ from those of a model of your own. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUILT_IN_MODEL: Mapping[str, Mapping[str, Any]] = {
    "model": {"dtype": "float32", "activation_checkpointing": False},
    "warmup": {"steps": 320},  # its weights are random: RL needs a policy that earns some rewards
    "rollout": {"max_response": 80},
    "update": {"learning_rate": 2e-4},
    "critic": {"learning_rate": 1e-3},
}
"""By section; its sizes are the defaults of `ModelSettings`."""


def fill_built_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the sections of `BUILT_IN_MODEL` have what was not given.

    settings   of a run without `model.path`; sections that are no tables stay as they are
    """
    filled = dict(settings)
    for section, values in BUILT_IN_MODEL.items():
        given = settings.get(section, {})
        if isinstance(given, dict):
            filled[section] = {**values, **given}
    return filled
