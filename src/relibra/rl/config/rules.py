"""Rules between settings: what does not fit together, once all defaults are filled in. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relibra.rl.config.defaults import PRESETS
from relibra.rl.config.rollout_settings import MOST_RESPONSES
from relibra.rl.config.settings import NO_EXPERTS, RunConfig

Broken = tuple[str, str, str]
"""The setting that does not fit, why (other settings are named as section.key), and what to do."""


def broken_rules(config: RunConfig) -> Iterator[Broken]:
    """Yield every rule that a configuration breaks."""
    yield from _of_model(config)
    yield from _of_task(config)
    yield from _of_algorithm(config)
    yield from _of_batches(config)
    yield from _of_windows(config)
    yield from _of_servers(config)
    yield from _of_plan(config)


def _of_model(config: RunConfig) -> Iterator[Broken]:
    """Check the built-in model; the sizes of others are known only when they are loaded."""
    model, experts = config.model, config.model.num_experts
    if model.path:
        return
    if 0 < experts < model.experts_per_token:
        yield "model.experts_per_token", f"exceeds model.num_experts {experts}", ""
    if not experts and config.algorithm.replay != "off":
        why = "needs a model with experts, and model.num_experts is 0"
        yield "algorithm.replay", why, f"set algorithm.replay=off; {NO_EXPERTS}"
    if experts % config.parallel.ranks:
        why = f"does not divide model.num_experts {experts}: every rank needs the same number of experts"
        yield "parallel.ranks", why, ""


def _of_task(config: RunConfig) -> Iterator[Broken]:
    """Check that prompts of a file have a file and a model."""
    if config.task.name == "prompts" and config.task.file is None:
        yield "task.name", "needs task.file: a .jsonl or .parquet file with one prompt per row", ""
    if config.task.name == "prompts" and not config.model.path:
        yield "task.name", "needs model.path: the built-in model knows only the built-in tasks", ""


def _of_algorithm(config: RunConfig) -> Iterator[Broken]:
    """Check the loss and its terms."""
    algorithm, longest = config.algorithm, config.rollout.max_response
    if 0 < algorithm.dual_clip <= 1:
        yield "algorithm.dual_clip", "above 1, or 0 for none", ""
    if ":" not in algorithm.loss and algorithm.loss not in PRESETS:
        yield "algorithm.loss", f"allowed are {', '.join(PRESETS)}, or a function of yours as 'module:function'", ""
    if algorithm.overlong_buffer > longest:
        yield "algorithm.overlong_buffer", f"exceeds rollout.max_response {longest}", ""


def _of_batches(config: RunConfig) -> Iterator[Broken]:
    """Check that every mini-batch has responses, and whole groups if advantages compare a group."""
    rollout, mini_batches = config.rollout, config.update.mini_batches
    prompts, per_prompt, responses = rollout.prompts_per_step, rollout.responses_per_prompt, rollout.responses_per_step
    by_group = config.algorithm.advantage == "group"
    if responses > MOST_RESPONSES:
        why = f"with rollout.responses_per_prompt {per_prompt} more than {MOST_RESPONSES:,} responses in a step"
        yield "rollout.prompts_per_step", why, ""
    if by_group and per_prompt < 2:
        why = f"algorithm.preset {config.algorithm.preset!r} compares responses to the same prompt"
        yield "rollout.responses_per_prompt", why, "set 2 or more, or use preset 'ppo'"
    if by_group and mini_batches > prompts:
        why = f"exceeds rollout.prompts_per_step {prompts}: a mini-batch holds at least one whole group"
        yield "update.mini_batches", why, ""
    if not by_group and mini_batches > responses:
        why = f"exceeds the {responses} responses of a step (rollout.prompts_per_step x rollout.responses_per_prompt)"
        yield "update.mini_batches", why, ""


def _of_windows(config: RunConfig) -> Iterator[Broken]:
    """Check what depends on windows: responses that end in a later step than they begin."""
    rollout, algorithm = config.rollout, config.algorithm
    window, longest = rollout.window_tokens, rollout.max_response
    if longest % window:
        fitting = max(width for width in range(1, window + 1) if longest % width == 0)
        instead = f"set rollout.max_response to {longest + -longest % window} or the window to {fitting}"
        yield "rollout.window", f"does not divide rollout.max_response {longest}", instead
        return
    if window < longest and algorithm.advantage == "group":
        why = f"is below rollout.max_response {longest}, and algorithm.preset compares whole responses"
        instead = "unfinished responses have no reward: use preset 'tppo', or rollout.window=0"
        yield "rollout.window", why, instead
    if window < longest and algorithm.group_filter != "off":
        why = f"compares the responses of a group, and with rollout.window {window} they end in different steps"
        yield "algorithm.group_filter", why, "set algorithm.group_filter=off"
    if window < longest and algorithm.tail_drop >= window:
        yield "algorithm.tail_drop", f"leaves nothing of rollout.window {window}", "set a smaller one"
    if rollout.refill and rollout.engine != "embedded":
        why = f"rollout.engine {rollout.engine!r} does not report decode steps"
        yield "rollout.refill", why, "set rollout.refill=false"
    if rollout.refill and window == longest:
        why = f"needs rollout.window below rollout.max_response {longest}"
        yield "rollout.refill", why, "set a window, or rollout.refill=false"
    of_rank = -(-rollout.responses_per_step // config.parallel.ranks)
    if rollout.refill and of_rank > rollout.max_batch:
        why = (
            f"is below the {of_rank} responses of a rank (rollout.prompts_per_step x rollout.responses_per_prompt / "
            "parallel.ranks), and rollout.refill decodes all of them at once"
        )
        yield "rollout.max_batch", why, "increase it, or set rollout.refill=false"


def _of_servers(config: RunConfig) -> Iterator[Broken]:
    """Check that there are servers where they sample, and that the folder of new weights is not that of the model."""
    rollout, engine, weights = config.rollout, config.rollout.engine, config.rollout.server_weights
    starts_on_ray = config.parallel.launcher == "ray" and rollout.starts_servers
    if engine == "serve" and rollout.url:
        instead = "leave it out, or set rollout.engine=vllm for a server of relibra that runs already"
        yield "rollout.url", "rollout.engine 'serve' starts its server itself", instead
    if engine in ("sglang", "vllm") and not starts_on_ray and not (rollout.url and weights):
        why = "needs rollout.url (the server) and rollout.server_weights (a folder that both see)"
        yield "rollout.engine", why, "with parallel.launcher=ray a run starts vLLM itself" * (engine == "vllm")
    path = config.model.path and Path(config.model.source).resolve()
    if engine != "embedded" and weights and path and weights.expanduser().resolve() == path:
        instead = "set a folder of its own, in which new weights are written"
        yield "rollout.server_weights", "is the folder of model.path", instead


def _of_plan(config: RunConfig) -> Iterator[Broken]:
    """Check the name of the balancer."""
    name = config.plan.balancer
    if name in ("relibra", "static", "live") or ":" in name:
        return  # importing the others loads numba, and of the user's runs his code: `find_balancer` checks that
    from relibra.planning.registry import find_balancer

    try:
        find_balancer(name)
    except ValueError as error:
        yield "plan.balancer", str(error), ""
