"""Lengths of prompts and responses that fit the context of a model of your own. Imports no torch."""

from __future__ import annotations

from typing import Any

from relibra.rl.config.model_folder import read_model_sizes
from relibra.rl.config.rollout_settings import RolloutSettings


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
    """Return the tokens that the config.json of a model allows; None: it does not say, or is not on this machine."""
    found = read_model_sizes(path).get("max_position_embeddings")
    return found if isinstance(found, int) and not isinstance(found, bool) and 2 <= found < 1 << 30 else None
