"""Settings of earlier versions, and what stands for each today: old files are read, or refused with today's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SERVERS = "rollout.url: start rollout servers yourself, and name them there"
_CONSTANT = "is gone: nobody changed it"

REMOVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "task.operation": (("reverse",), "is gone: the task 'strings' reverses"),
    "task.max_letters": ((12,), "task.max_terms is the most letters of the task 'strings' too"),
    "task.max_failed_rewards": ((0.1,), "is gone: a tenth of the rewards of a step may fail"),
    "model.num_heads": ((4,), "is gone: the built-in model has 4 heads"),
    "model.head_dim": ((0,), "is gone: it follows from model.hidden_size and rollout.engine"),
    "model.activation_checkpointing": ((False,), "update.activations: recompute, host or keep"),
    "rollout.servers": ((1,), _SERVERS),
    "rollout.server_cpus": ((0,), _SERVERS),
    "rollout.server_gpus": ((None,), _SERVERS),
    "rollout.server_python": (("",), _SERVERS),
    "rollout.retry_seconds": ((300.0,), "rollout.start_seconds is for servers that are lost too"),
    "rollout.long_prompts": (("skip",), "is gone: prompts above rollout.max_prompt are left out"),
    "algorithm.advantage": (("group",), "algorithm.preset decides it: ppo and tppo have a value model"),
    "algorithm.gamma": ((1.0,), "is gone: rewards are not discounted"),
    "algorithm.lambda_mode": (("fixed",), "algorithm.lambda_policy=length_adaptive"),
    "algorithm.lambda_alpha": ((0.05,), _CONSTANT),
    "algorithm.bootstrap": (("hold",), _CONSTANT),
    "algorithm.advantage_clamp": ((10.0,), _CONSTANT),
    "algorithm.positive_coefficient": ((0.0,), "algorithm.loss: tppo has that term with 0.1, ppo has none"),
    "algorithm.correction_low": ((0.5,), "algorithm.correction decides its range"),
    "algorithm.correction_high": ((2.0,), "algorithm.correction decides its range"),
    "algorithm.ratio": (("token",), "algorithm.loss=gspo has one ratio per response, the others one per token"),
    "update.weight_decay": ((0.0,), "is gone: at the learning rates of RL it does nothing"),
    "update.max_skipped": ((5,), _CONSTANT),
    "critic.clip_low": ((0.5,), _CONSTANT),
    "critic.clip_high": ((0.6,), _CONSTANT),
    "plan.objective": (("seconds",), "plan.balancer=relibra_paper_tokens evens token-slots out"),
    "plan.static_rows": ((False,), "is gone: with plan.pack=true loads are even"),
    "parallel.device": (("auto",), "is gone: hide the GPUs to train on the CPU (CUDA_VISIBLE_DEVICES=)"),
    "parallel.threads_per_rank": ((1,), "parallel.ranks: each has one thread"),
    "trace.keep_every": ((50,), "is gone: with trace.keep above 0 the routes of each 50th step stay"),
    "evaluation.stop_at": ((None,), "run.steps"),
}
"""By section.key: values that mean what happens today, so that a file with them is read, and what to do for others."""


def without_removed(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return sections without removed settings, and name and value of each of those whose value holds no more."""
    settings = {section: dict(part) if isinstance(part, Mapping) else part for section, part in given.items()}
    parts = {section: part for section, part in settings.items() if isinstance(part, dict)}
    kept, refused = _kept_values(parts), list[tuple[str, Any]]()
    for name, (values, _) in REMOVED.items():
        section, key = name.split(".")
        if key in parts.get(section, {}):
            value = parts[section].pop(key)
            if value not in kept.get(name, values):
                refused.append((name, value))
            elif name == "algorithm.lambda_mode" and value == "length_adaptive":
                parts[section].pop("lambda_policy", None)  # it was the floor then
            elif name == "algorithm.lambda_mode":
                parts[section].setdefault("lambda_policy", 0.95)  # a number means fixed
    return settings, refused


def _kept_values(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return, for removed settings whose defaults followed from other settings, the values that still hold."""
    algorithm, model = settings.get("algorithm", {}), settings.get("model", {})
    preset, kept = algorithm.get("preset"), dict[str, tuple[Any, ...]]()
    if algorithm.get("loss", preset) == "gspo":
        kept["algorithm.ratio"] = ("sequence",)
    if algorithm.get("loss", preset) == "tppo":
        kept["algorithm.positive_coefficient"] = (0.1,)
    if algorithm.get("correction") == "icepop":
        kept["algorithm.correction_high"] = (5.0,)
    if preset in ("ppo", "tppo"):
        kept["algorithm.advantage"] = ("gae",)
    if preset == "tppo" and algorithm.get("lambda_policy", 0.95) == 0.95:
        kept["algorithm.lambda_mode"] = ("length_adaptive", "fixed")
    if model.get("path"):
        kept["model.activation_checkpointing"] = (True,)
    hidden = model.get("hidden_size", 64)
    if settings.get("rollout", {}).get("engine") in ("sglang", "vllm") and isinstance(hidden, int):
        kept["model.head_dim"] = (0, max(32, hidden // 4))
    return kept
