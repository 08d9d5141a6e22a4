"""Defaults that follow from other settings: of the preset, of the built-in model, of the context of another model.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from relibra.rl.algorithms import dapo, grpo, gspo, ppo, tppo
from relibra.rl.config.model_folder import read_model_sizes
from relibra.rl.config.rollout_settings import MAX_LENGTH, RolloutSettings
from relibra.rl.config.settings import AlgorithmSettings, ModelSettings

PRESETS: dict[str, dict[str, Any]] = {one.SETTINGS["loss"]: one.SETTINGS for one in (ppo, tppo, grpo, dapo, gspo)}
"""Published algorithms as values of `AlgorithmSettings`. They set no sizes or learning rates."""

BUILT_IN_MODEL: Mapping[str, Mapping[str, Any]] = {
    "model": {"dtype": "float32", "activation_checkpointing": False},
    "warmup": {"steps": 320},  # its weights are random: RL needs a policy that earns some rewards
    "rollout": {"max_response": 80},
    "update": {"learning_rate": 2e-4},
    "critic": {"learning_rate": 1e-3},
}
"""By section, where they differ from those of a model of your own; its sizes are the defaults of `ModelSettings`."""

LEAST_SERVED_HEAD = 32
"""Width of heads that vLLM's attention on a CPU needs."""


def _fill_from_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the values of the built-in model, or lengths that fit the context of another."""
    path = settings.get("model", {}).get("path")
    if path:
        return {**settings, "rollout": _fit_lengths(path, settings.get("rollout", {}))}
    filled = dict(settings)
    for section, values in BUILT_IN_MODEL.items():
        given = settings.get(section, {})
        if isinstance(given, dict):
            filled[section] = {**values, **given}
    return filled


def _widen_heads(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the width of heads of the built-in model where a server samples."""
    model, engine = settings.get("model", {}), settings.get("rollout", {}).get("engine", "embedded")
    if model.get("path") or engine in ("embedded", "serve"):
        return settings
    try:
        sizes = ModelSettings.model_validate(model)
    except ValidationError:  # told when the sections are checked
        return settings
    width = max(LEAST_SERVED_HEAD, sizes.hidden_size // sizes.num_heads)
    return {**settings, "model": {"head_dim": width, **model}}


def _set_window(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the window of preset tppo, and the tokens at its end that do not train."""
    algorithm, rollout = settings.get("algorithm", {}), settings.get("rollout", {})
    longest = rollout.get("max_response", 0)
    window = rollout.get("window", tppo.choose_window(longest) if _is_length(longest) else None)
    if algorithm.get("preset") != "tppo" or not _is_length(window, may_be_0=True):
        return settings  # what is out of range is refused later, with its name
    drop = {"tail_drop": min(8, window // 4)} if window else {}
    return {**settings, "rollout": {**rollout, "window": window}, "algorithm": {**drop, **algorithm}}


def _warm_up_value_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the warm-up of the value model of presets ppo and tppo."""
    if settings.get("algorithm", {}).get("preset") not in ("ppo", "tppo"):
        return settings
    try:
        rollout = RolloutSettings.model_validate(settings.get("rollout", {}))
    except ValidationError:  # told when the sections are checked
        return settings
    warm_up = {
        "pretrain_steps": max(10, rollout.max_windows),  # then every response of the first step has ended
        "min_finished": min(64, rollout.responses_per_step),
        "explained_variance_gate": 0.0,
    }
    return {**settings, "critic": {**warm_up, **settings.get("critic", {})}}


def _fill_from_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """Set the values of the preset."""
    algorithm = settings.get("algorithm", {})
    name = algorithm.get("preset", AlgorithmSettings().preset)
    preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
    bounds = {"correction_high": 5.0} if algorithm.get("correction") == "icepop" else {}
    return {**settings, "algorithm": {**preset, **bounds, **algorithm}}


FILLS = (_fill_from_model, _widen_heads, _set_window, _warm_up_value_model, _fill_from_preset)
"""Each returns sections with more of what was not given, in the order in which one follows from the other."""


def _fit_lengths(path: Any, rollout: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the rollout with lengths that fit the context of a model; a window given divides the response.

    path   of the model
    """
    context = read_model_sizes(path).get("max_position_embeddings")
    usual, max_prompt, longest = RolloutSettings(), rollout.get("max_prompt"), RolloutSettings().max_response
    if isinstance(context, int) and not isinstance(context, bool) and 2 <= context < 1 << 30:
        if not isinstance(max_prompt, int):
            max_prompt = min(usual.max_prompt, max(1, context // 2))
        longest = max(1, min(longest, context - max_prompt))
    window = rollout.get("window")
    if isinstance(window, int) and 0 < window <= longest:
        longest -= longest % window
    return {"max_prompt": usual.max_prompt if max_prompt is None else max_prompt, "max_response": longest, **rollout}


def _is_length(value: Any, *, may_be_0: bool = False) -> bool:
    """Return whether a setting is a number of tokens that responses may have."""
    return type(value) is int and 1 - may_be_0 <= value <= MAX_LENGTH
