"""Defaults for a model of the user: those of post-training, where the built-in toy has others. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bfloat16", "activation_checkpointing": True},
    "warmup": {"steps": 0},
    "update": {"learning_rate": 1e-6},
    "critic": {"learning_rate": 1e-5},
}
"""By section; lengths follow from the model's context (`choose_lengths`)."""

USUAL_RATE = 1e-6
"""Learning rate of RL post-training; far larger ones destroy a model in a few steps."""
HIGH_RATE = 20 * USUAL_RATE
_MAX_PROMPT, _MAX_RESPONSE = 1024, 8192
_MAX_CONFIG_BYTES = 1 << 20


def fill_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which the sections of `DEFAULTS` and the lengths have what was not given.

    settings   of a run with `model.path`; sections that are no tables stay as they are
    """
    rollout = settings.get("rollout")
    given = rollout.get("max_prompt") if isinstance(rollout, dict) else None
    wanted = {**DEFAULTS, "rollout": choose_lengths(read_context(settings["model"]["path"]), given)}
    filled = dict(settings)
    for section, values in wanted.items():
        given = settings.get(section, {})
        if isinstance(given, dict):
            filled[section] = {**values, **given}
    rollout = filled["rollout"]
    if isinstance(rollout, dict) and "window" in rollout and "max_response" not in settings.get("rollout", {}):
        window = rollout["window"]
        if isinstance(window, int) and 0 < window <= rollout["max_response"]:
            rollout["max_response"] -= rollout["max_response"] % window
    return filled


def choose_lengths(context: int | None, max_prompt: Any = None) -> dict[str, int]:
    """Return the longest prompt and response: 1,024 and 8,192 tokens, less where the context holds less.

    max_prompt   as given, if it is; the response then gets what is left
    """
    if context is None:
        return {"max_prompt": _MAX_PROMPT, "max_response": _MAX_RESPONSE}
    if not isinstance(max_prompt, int):
        max_prompt = min(_MAX_PROMPT, max(1, context // 2))
    return {"max_prompt": max_prompt, "max_response": max(1, min(_MAX_RESPONSE, context - max_prompt))}


def read_context(path: Any) -> int | None:
    """Return the tokens that a model folder's config.json allows; None: not there, or a model on the hub."""
    try:
        file = Path(path) / "config.json"
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        body = json.loads(file.read_bytes())
        found = (body.get("text_config") or body)["max_position_embeddings"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) and 2 <= found < 1 << 30 else None
