"""Rules between sections of the configuration; each function raises ValueError naming the settings that conflict."""

from __future__ import annotations

from pathlib import Path

from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.settings import (
    AlgorithmSettings,
    ModelSettings,
    ParallelSettings,
    PlanSettings,
    TaskSettings,
    UpdateSettings,
)

NO_EXPERTS = "a model without experts has nothing to balance, so plan.* has no effect"
"""Ends the refusals of a dense model that is told to replay."""


def check_model(model: ModelSettings, algorithm: AlgorithmSettings, parallel: ParallelSettings) -> None:
    """Check the built-in model; the sizes of others are known only when they are loaded."""
    if model.path:
        return
    if not model.num_experts and algorithm.replay != "off":
        raise ValueError(
            f"algorithm.replay {algorithm.replay!r} needs a model with experts, and model.num_experts is 0: set "
            f"algorithm.replay=off; {NO_EXPERTS}"
        )
    if model.num_experts % parallel.ranks:
        raise ValueError(
            f"parallel.ranks {parallel.ranks} does not divide model.num_experts {model.num_experts}: every rank needs "
            "the same number of experts"
        )


def check_task(task: TaskSettings, model: ModelSettings) -> None:
    """Check that prompts of a file have a file and a model."""
    if task.name != "prompts":
        return
    if task.file is None:
        raise ValueError("task.name 'prompts' needs task.file: a .jsonl or .parquet file with one prompt per row")
    if not model.path:
        raise ValueError("task.name 'prompts' needs model.path: the built-in model knows only the built-in tasks")


def check_groups(rollout: RolloutSettings, algorithm: AlgorithmSettings, update: UpdateSettings) -> None:
    """Check that every mini-batch has responses, and whole groups if advantages compare a group."""
    if algorithm.advantage == "gae":
        if update.mini_batches > rollout.responses_per_step:
            raise ValueError(
                f"update.mini_batches {update.mini_batches} exceeds the {rollout.responses_per_step} responses of a "
                "step (rollout.prompts_per_step x rollout.responses_per_prompt)"
            )
        return
    if rollout.responses_per_prompt < 2:
        raise ValueError(
            "rollout.responses_per_prompt 1 does not work with algorithm.advantage 'group', which compares responses "
            "to the same prompt: set 2 or more, or use preset 'ppo'"
        )
    if update.mini_batches > rollout.prompts_per_step:
        raise ValueError(
            f"update.mini_batches {update.mini_batches} exceeds rollout.prompts_per_step {rollout.prompts_per_step}: a "
            "mini-batch holds at least one whole group"
        )


def check_windows(rollout: RolloutSettings, algorithm: AlgorithmSettings, parallel: ParallelSettings) -> None:
    """Check what depends on windows: responses that end in a later step than they begin."""
    window, longest = rollout.window_tokens, rollout.max_response
    if window < longest and algorithm.advantage == "group":
        raise ValueError(
            f"rollout.window {window} is below rollout.max_response {longest}, which does not work with "
            "algorithm.advantage 'group': unfinished responses have no reward; use preset 'tppo', or window 0"
        )
    if window < longest and algorithm.group_filter != "off":
        raise ValueError(
            f"algorithm.group_filter {algorithm.group_filter!r} compares the responses of a group, and with "
            f"rollout.window {window} below rollout.max_response {longest} they end in different steps: set "
            "algorithm.group_filter=off"
        )
    if rollout.refill and window == longest:
        raise ValueError(
            f"rollout.refill needs rollout.window below rollout.max_response {longest}: without windows a step ends "
            "when all its responses end; set a window, or rollout.refill=false"
        )
    of_rank = -(-rollout.responses_per_step // parallel.ranks)
    if rollout.refill and of_rank > rollout.max_batch:
        raise ValueError(
            f"rollout.max_batch {rollout.max_batch} is below the {of_rank} responses of a rank "
            "(rollout.prompts_per_step x rollout.responses_per_prompt / parallel.ranks), and rollout.refill decodes "
            "all of them at once: increase it, or set rollout.refill=false"
        )
    if window < longest and algorithm.tail_drop >= window:
        raise ValueError(
            f"algorithm.tail_drop {algorithm.tail_drop} leaves nothing of rollout.window {window}: set a smaller one"
        )
    if algorithm.overlong_buffer > longest:
        raise ValueError(
            f"algorithm.overlong_buffer {algorithm.overlong_buffer} exceeds rollout.max_response {longest}"
        )


def check_server(rollout: RolloutSettings, model: ModelSettings, parallel: ParallelSettings) -> None:
    """Check that there are servers where they sample, and that the folder of new weights is not that of the model."""
    on_ray = parallel.launcher == "ray"
    if rollout.engine in ("sglang", "vllm") and not rollout.url and not (on_ray and rollout.starts_servers):
        alone = "; with parallel.launcher=ray a run starts vLLM itself" if rollout.engine == "vllm" else ""
        raise ValueError(
            f"rollout.engine {rollout.engine!r} needs rollout.url (the server) and rollout.server_weights (a folder "
            f"that both see){alone}"
        )
    if rollout.servers > 1 and not (on_ray and rollout.starts_servers):
        raise ValueError(
            f"rollout.servers {rollout.servers} are started on Ray only, with rollout.engine=serve, or vllm without "
            "rollout.url: set parallel.launcher=ray, or leave it out"
        )
    if rollout.engine == "embedded" or not model.path or rollout.server_weights is None:
        return
    if rollout.server_weights.expanduser().resolve() == Path(model.source).resolve():
        raise ValueError(
            f"rollout.server_weights {str(rollout.server_weights)!r} is the folder of model.path: set it to a folder "
            "of its own, in which new weights are written"
        )


def check_plan(plan: PlanSettings) -> None:
    """Check the name of the balancer."""
    if plan.balancer in ("relibra", "static", "live"):
        return  # importing the others loads numba
    from relibra.planning import BALANCERS

    if plan.balancer not in BALANCERS:
        raise ValueError(f"plan.balancer {plan.balancer!r} is unknown: allowed are {', '.join(BALANCERS)}")
