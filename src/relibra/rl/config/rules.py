"""Rules between settings: what does not fit together, once all defaults are filled in. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from relibra.rl.config.defaults import PRESETS
from relibra.rl.config.rollout_settings import LOOPBACK, MOST_RESPONSES
from relibra.rl.config.settings import NO_EXPERTS, RunConfig

Broken = tuple[str, str, str]
"""The setting that does not fit, why (other settings are named as section.key), and what to do."""


def broken_rules(config: RunConfig) -> Iterator[Broken]:
    """Yield every rule that a configuration breaks."""
    model, rollout, algorithm, update = config.model, config.rollout, config.algorithm, config.update
    ranks, by_group = config.parallel.ranks, algorithm.advantage == "group"

    # The built-in model; the sizes of others are known only when they are loaded.
    if not model.path and 0 < model.num_experts < model.experts_per_token:
        yield "model.experts_per_token", f"exceeds model.num_experts {model.num_experts}", ""
    if not model.path and not model.num_experts and algorithm.replay != "off":
        why = "needs a model with experts, and model.num_experts is 0"
        yield "algorithm.replay", why, f"set algorithm.replay=off; {NO_EXPERTS}"
    if not model.path and model.num_experts % ranks:
        why = f"does not divide model.num_experts {model.num_experts}: every rank needs the same number of experts"
        yield "parallel.ranks", why, ""

    if config.lora.rank and not model.path:
        why = "needs model.path: the weights of the built-in model are random, and adapters leave them as they are"
        yield "lora.rank", why, "train it with run.steps=0 first and set model.path=RUN/policy"
    if config.lora.rank and (rollout.sleep or rollout.transfer in ("nccl", "ipc")):
        why = "sends only the adapters to a server on GPUs, as a folder that it loads beside its weights"
        yield "lora.rank", why, "set rollout.transfer=folder and rollout.sleep=false"

    # The task.
    if config.task.name == "prompts" and config.task.file is None:
        yield "task.name", "needs task.file: a .jsonl or .parquet file with one prompt per row", ""
    if config.task.name == "prompts" and not model.path:
        yield (
            "task.name",
            "needs model.path: the built-in model knows only the built-in tasks",
            "name a folder, such as RUN/policy",
        )

    # The loss.
    if 0 < algorithm.dual_clip <= 1:
        yield "algorithm.dual_clip", "above 1, or 0 for none", ""
    if ":" not in algorithm.loss and algorithm.loss not in PRESETS:
        yield "algorithm.loss", f"allowed are {', '.join(PRESETS)}, or a function of yours as 'module:function'", ""

    # Old log-probs of the sampler.
    if algorithm.old_log_probs == "sampler" and algorithm.loss not in ("ppo", "grpo", "dapo"):
        why = "is for the losses ppo, grpo and dapo, in whose ratios of single tokens a mismatch is just a factor"
        yield "algorithm.old_log_probs", f"{why}, and algorithm.loss is {algorithm.loss!r}", "set skip_first"
    if algorithm.old_log_probs == "sampler" and algorithm.replay == "R2":
        why = "leaves out the recompute pass, from which algorithm.replay 'R2' takes routes"
        yield "algorithm.old_log_probs", why, "set skip_first, or algorithm.replay=R3"
    if algorithm.old_log_probs == "sampler" and (rollout.ahead or rollout.on_update == "keep"):
        setting = "rollout.ahead" if rollout.ahead else "rollout.on_update 'keep'"
        why = f"takes log-probs of the weights before the update alone, and with {setting} older ones take part"
        yield "algorithm.old_log_probs", why, "set skip_first"
    if update.on_mismatch == "fall_back" and algorithm.old_log_probs != "sampler":
        why = f"computes what algorithm.old_log_probs {algorithm.old_log_probs!r} computes anyway"
        yield "update.on_mismatch", why, "set warn or stop"
    if update.on_mismatch and (algorithm.old_log_probs == "recompute" or algorithm.replay == "R2"):
        why = "checks log-probs that the update itself computes, and here a pass has computed them all"
        yield "update.on_mismatch", why, "leave it out, or set skip_first and algorithm.replay=R3"
    if rollout.mixed_routes != "replay" and not rollout.ahead:
        why = "is for answers that an update of the weights cuts"
        yield "rollout.mixed_routes", why, "set rollout.ahead, or leave it out"
    if rollout.on_update == "keep" and not rollout.keeps_cache:
        asked_for = rollout.ahead and rollout.engine in ("sglang", "vllm")
        if not asked_for or rollout.transfer != "folder" or config.lora.rank:
            why = "is for rollout.ahead with servers of sglang or vllm, whole models, and rollout.transfer=folder"
            yield "rollout.on_update", f"{why}; or for rollout.window with the embedded engine", "leave it out"
        if rollout.mixed_routes == "rescore":
            why = "scores the tokens before a cut, and rollout.on_update 'keep' cuts none"
            yield "rollout.mixed_routes", why, "set replay or mask, or rollout.on_update=cut"
    if rollout.mixed_routes == "rescore" and rollout.temperature != 1:
        why = "takes log-probs of given tokens, which servers compute at temperature 1"
        yield "rollout.mixed_routes", why, "set rollout.temperature=1, or replay or mask"

    # Device memory: what stays there, and what is in host memory while it is not used.
    follows = config.follows_plans and not config.plan.live
    if algorithm.replay == "off" or (ranks > 1 and not follows):
        why = "counts the rows of each rank from replayed routes and the plan of a step, and this run has none"
        if update.activations == "plan":
            yield "update.activations", why, "set update.activations=recompute, or algorithm.replay and plan.balancer"
        if not update.micro_batch_tokens:
            yield "update.micro_batch_tokens", why, "name a size, or set algorithm.replay and plan.balancer"
    if update.optimizer == "adamw8bit" and update.offload != "off":
        why = "keeps its moments on the device, and update.offload moves those of 'adamw'"
        yield "update.optimizer", why, "set update.offload=off, or update.optimizer=adamw"
    if update.offload == "all" and rollout.engine == "embedded":
        why = "takes the policy from the device while a server samples, and rollout.engine 'embedded' samples there"
        yield "update.offload", why, "set update.offload=moments, or another engine"

    # Every mini-batch has responses, and whole groups if advantages compare a group.
    prompts, per_prompt, responses = rollout.prompts_per_step, rollout.responses_per_prompt, rollout.responses_per_step
    if responses > MOST_RESPONSES:
        why = f"with rollout.responses_per_prompt {per_prompt} more than {MOST_RESPONSES:,} responses in a step"
        yield "rollout.prompts_per_step", why, ""
    if by_group and per_prompt < 2:
        why = f"algorithm.preset {algorithm.preset!r} compares responses to the same prompt"
        yield "rollout.responses_per_prompt", why, "set 2 or more, or use preset 'ppo'"
    if by_group and update.mini_batches > prompts:
        why = f"exceeds rollout.prompts_per_step {prompts}: a mini-batch holds at least one whole group"
        yield "update.mini_batches", why, ""
    if not by_group and update.mini_batches > responses:
        why = f"exceeds the {responses} responses of a step (rollout.prompts_per_step x rollout.responses_per_prompt)"
        yield "update.mini_batches", why, ""

    # Windows: responses that end in a later step than they begin.
    window, longest = rollout.window_tokens, rollout.max_response
    windowed, of_rank = window < longest, -(-responses // ranks)
    if longest % window:
        fitting = max(width for width in range(1, window + 1) if longest % width == 0)
        instead = f"set rollout.max_response to {longest + -longest % window} or the window to {fitting}"
        yield "rollout.window", f"does not divide rollout.max_response {longest}", instead
    elif windowed and by_group:
        why = f"is below rollout.max_response {longest}, and algorithm.preset compares whole responses"
        yield "rollout.window", why, "unfinished responses have no reward: use preset 'tppo', or rollout.window=0"
    if windowed and algorithm.group_filter != "off":
        why = f"compares the responses of a group, and with rollout.window {window} they end in different steps"
        yield "algorithm.group_filter", why, "set algorithm.group_filter=off"
    if windowed and algorithm.tail_drop >= window:
        yield "algorithm.tail_drop", f"leaves nothing of rollout.window {window}", "set a smaller one"
    if algorithm.overlong_buffer > longest:
        yield "algorithm.overlong_buffer", f"exceeds rollout.max_response {longest}", ""
    if rollout.refill and rollout.engine != "embedded":
        why = f"rollout.engine {rollout.engine!r} does not report decode steps"
        yield "rollout.refill", why, "set rollout.refill=false"
    if rollout.refill and not windowed:
        why = f"needs rollout.window below rollout.max_response {longest}"
        yield "rollout.refill", why, "set a window, or rollout.refill=false"
    if rollout.keeps_cache and not windowed:
        why = f"'keep' needs rollout.window below rollout.max_response {longest}: else nothing goes on after an update"
        yield "rollout.on_update", why, "set a window, or leave it out"
    at_once = "refill" if rollout.refill else "on_update" if rollout.keeps_cache else ""
    if at_once and of_rank > rollout.max_batch:
        why = (
            f"is below the {of_rank} responses of a rank (rollout.prompts_per_step x rollout.responses_per_prompt / "
            f"parallel.ranks), and rollout.{at_once} needs a slot for each of them"
        )
        yield "rollout.max_batch", why, f"increase it, or leave rollout.{at_once} out"

    # Sampling while a step trains.
    if rollout.ahead and rollout.engine == "embedded":
        why = "samples while a step trains, and rollout.engine 'embedded' samples in the processes that train"
        yield "rollout.ahead", why, "set rollout.engine=serve, or another server; or rollout.ahead=0"
    if rollout.ahead and (rollout.sleep or update.offload == "all"):
        why = "samples while a step trains, and rollout.sleep and update.offload 'all' are for one after the other"
        yield "rollout.ahead", why, "set rollout.sleep=false and update.offload=moments; or rollout.ahead=0"

    # Servers: what each engine and transfer needs; and new weights are not written into the folder of the model.
    engine, weights = rollout.engine, rollout.server_weights
    if engine == "serve" and rollout.url:
        instead = "leave it out, or set rollout.engine=vllm for a server of relibra that runs already"
        yield "rollout.url", "rollout.engine 'serve' starts its server itself", instead
    if engine in ("sglang", "vllm") and not (rollout.url and (weights or rollout.transfer != "folder")):
        why = "needs rollout.url (the server) and rollout.server_weights (a folder that both see)"
        yield "rollout.engine", why, ""
    if rollout.transfer != "folder" and engine != "vllm":
        why = f"sends weights to a vLLM server, and rollout.engine is {engine!r}"
        yield "rollout.transfer", why, "set rollout.transfer=folder"
    if rollout.transfer == "ipc" and any(urlsplit(url).hostname not in LOOPBACK for url in rollout.url):
        why = f"shares memory within this machine, so rollout.url must be one of {', '.join(LOOPBACK)}"
        yield "rollout.transfer", why, "set rollout.transfer=nccl or folder for other machines"
    if rollout.sleep and engine not in ("sglang", "vllm"):
        yield "rollout.sleep", f"needs a server of sglang or vllm, and rollout.engine is {engine!r}", "leave it out"
    if rollout.sleep and rollout.transfer in ("nccl", "gloo"):
        why = "is for a GPU that both share" + (", on which NCCL cannot send" if rollout.transfer == "nccl" else "")
        yield "rollout.sleep", f"{why}: rollout.transfer is {rollout.transfer!r}", "set rollout.transfer=ipc or folder"
    if engine != "embedded" and weights and model.path and _same_folder(weights.expanduser(), Path(model.source)):
        instead = "set a folder of its own, in which new weights are written"
        yield "rollout.server_weights", "is the folder of model.path", instead

    # Not looked up here: the usual three, as the look-up loads numba; a user's function, as its import runs their code.
    if config.plan.balancer not in ("relibra", "static", "live") and ":" not in config.plan.balancer:
        from relibra.planning.registry import find_balancer

        try:
            find_balancer(config.plan.balancer)
        except ValueError as error:
            yield "plan.balancer", str(error), ""


def _same_folder(one: Path, other: Path) -> bool:
    try:
        return one.resolve() == other.resolve()
    except ValueError:  # no name of a file: what reads or writes there refuses it
        return False
