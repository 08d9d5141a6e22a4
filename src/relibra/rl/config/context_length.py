"""Lengths of prompts and responses that fit the context of a model of your own. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relibra.rl.config.settings import RolloutSettings

_MAX_CONFIG_BYTES = 1 << 20


def fit_lengths(path: Any, rollout: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the rollout with the lengths that were not given; a window given divides the response.

    path   of the model
    """
    filled = {**choose_lengths(read_context(path), rollout.get("max_prompt")), **rollout}
    window, longest = rollout.get("window"), filled["max_response"]
    if "max_response" not in rollout and isinstance(window, int) and 0 < window <= longest:
        filled["max_response"] = longest - longest % window
    return filled


def choose_lengths(context: int | None, max_prompt: Any = None) -> dict[str, int]:
    """Return the longest prompt and response: the defaults of `RolloutSettings`, less where the context holds less.

    max_prompt   as given, if it is; the response then gets what is left
    """
    usual = RolloutSettings()
    if context is None:
        return {"max_prompt": usual.max_prompt, "max_response": usual.max_response}
    if not isinstance(max_prompt, int):
        max_prompt = min(usual.max_prompt, max(1, context // 2))
    return {"max_prompt": max_prompt, "max_response": max(1, min(usual.max_response, context - max_prompt))}


def read_context(path: Any) -> int | None:
    """Return the tokens that a model folder's config.json allows; None: not there, or a model on the hub."""
    try:
        file = Path(path).expanduser() / "config.json"
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        body = json.loads(file.read_bytes())
        found = (body.get("text_config") or body)["max_position_embeddings"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # also an unknown home, deep JSON
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) and 2 <= found < 1 << 30 else None
