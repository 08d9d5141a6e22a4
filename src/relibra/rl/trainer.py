"""Training on one rank: warm-up or resume, RL steps with evaluation and checkpoints, the trained policy at the end."""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from relibra.calibration.machine import find_cluster
from relibra.cluster import Cluster
from relibra.environment import launched_rank
from relibra.rl.ahead import StepsAhead
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.batch.step_plan import try_balancer
from relibra.rl.config.plan_without_effect import plan_settings_without_effect
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.config.run_config import RunConfig
from relibra.rl.evaluation import evaluate
from relibra.rl.memory.measured import compare_memory
from relibra.rl.model.critic import build_critic
from relibra.rl.model.host_weights import move_to_host, on_device
from relibra.rl.model.optimizer import make_optimizer
from relibra.rl.model.policy import Policy, build_policy, reference_policy, save_policy
from relibra.rl.model.sharding import save_activations
from relibra.rl.model.tokenizer import Tokenizer, make_tokenizer
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.engines import check_engine, make_engine, sync_weights
from relibra.rl.rollout.own_server import own_server
from relibra.rl.rollout.prompt_lengths import encode_prompt, fit_prompts
from relibra.rl.rollout.response import RolloutEngine
from relibra.rl.rollout.served.canary_probe import Canary
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.sleep import put_servers_to_sleep, wake_after_failure
from relibra.rl.run.checkpoints.checkpoint import Models, load_checkpoint
from relibra.rl.run.checkpoints.checkpoint_writer import CheckpointWriter
from relibra.rl.run.display import TrainingDisplay
from relibra.rl.run.ranks import StopRequest, begin_stage, broadcast_json
from relibra.rl.run.run_folder import check_not_removed, has_checkpoint, locked_run_folder, write_config
from relibra.rl.run.step_logs import StepLogs, remove_steps_from
from relibra.rl.run.step_trace import StepTraces
from relibra.rl.step import Learner, Progress, rl_step
from relibra.rl.tasks.make import make_task, settings_without_effect
from relibra.rl.tasks.prompts import Prompts, check_same_rows, rows_state
from relibra.rl.tasks.task import Task
from relibra.rl.toy.warmup import warm_up
from relibra.rl.update.planned_activations import PlannedActivations

_log = logging.getLogger(__name__)


def train_rank(config: RunConfig, run: Path, device: torch.device) -> bool:
    """Train as one of the joined ranks; return False if Ctrl-C stopped it before the last step; collective.

    Every rank passes the same configuration and run folder. If the folder has a checkpoint, training continues from it.
    At the end, also after Ctrl-C, the folder holds all finished steps and the policy; and a checkpoint, unless
    `checkpoint.every` is 0 or Ctrl-C came during the warm-up.
    """
    torch.set_num_threads(1)
    stop = StopRequest()
    rank_0 = dist.get_rank() == 0
    with (
        locked_run_folder(run) if rank_0 else nullcontext(),
        TrainingDisplay(warmup_steps=config.warmup.steps, rl_steps=config.run.steps, enabled=rank_0) as display,
        ExitStack() as servers,
    ):
        stop.on_request = display.stopping
        return _train(config, run, device, display, stop, servers)


def _train(
    config: RunConfig, run: Path, device: torch.device, display: TrainingDisplay, stop: StopRequest, servers: ExitStack
) -> bool:
    cluster = _find_cluster(config, device)  # before the warm-up, which may be long
    loss = find_loss(config)
    task, tokenizer, policy, longest = _build_task_and_policy(config, run, device, display)
    _tell_plan_without_effect(config, policy, cluster)
    if policy.balanced and ":" in config.plan.balancer:
        try_balancer(config.plan, cluster, policy.num_experts)
    begin_stage("start of the rollout engine")
    rollout = servers.enter_context(own_server(config, run, policy, tokenizer))
    engine, canary = _make_engine(config, rollout, policy, task, tokenizer, longest)
    servers.callback(wake_after_failure, engine)
    if isinstance(engine, ServerEngine) and engine.sampler is not None:
        servers.callback(engine.sampler.close)
    put_servers_to_sleep(engine, canary, device)
    resumed = broadcast_json(has_checkpoint(run) if dist.get_rank() == 0 else None)
    warmed = resumed or _warm_up(config, policy, task, tokenizer, display, stop)
    learner = Learner(
        config=config,
        policy=policy,
        optimizer=make_optimizer(policy.trained, config.update.learning_rate, config.update),
        critic=_make_critic(config, policy, run, device),
        loss=loss,
        engine=engine,
        task=task,
        tokenizer=tokenizer,
        cluster=cluster,
        canary=canary,
    )
    learner, progress, step = _begin_or_resume(learner, run, device, resumed=resumed)
    if resumed:
        display.resumed(step)
    traces = StepTraces(run, config.trace, num_experts=policy.num_experts, layer_ids=policy.layer_ids)
    saved, stopped = step, stop.on_any_rank()
    first = step
    begins_ahead = config.rollout.ahead > 0 and step < config.run.steps
    ahead = StepsAhead(learner, traces, progress, step) if begins_ahead else None
    with (
        CheckpointWriter(run, config.checkpoint) as writer,
        StepLogs(run, step) if dist.get_rank() == 0 else nullcontext() as logs,
    ):
        if config.checkpoint.every and warmed and config.warmup.steps and not resumed:
            _stage(writer, 0, learner, progress)  # so that no resume repeats the warm-up
            writer.start()
        while step < config.run.steps and not stopped:
            baseline = None
            if config.evaluation.every and step == 0:
                baseline = evaluate(learner)
                display.baseline(baseline)
            with display.compiling() if step == first else nullcontext():
                take = None if ahead is None else partial(ahead.take, step)
                result = rl_step(step, learner, progress, traces, take)
            if ahead is not None:
                ahead.advance(step + 1)
            metrics, progress = result.metrics, result.progress
            metrics |= {"baseline": baseline, "evaluation": None}
            if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
                metrics["evaluation"] = evaluate(learner)
            step += 1
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                saved = _stage(writer, step, learner, progress)
                if isinstance(learner.engine, EmbeddedEngine):
                    learner.engine.kept = None  # as after a resume, so that both go on alike
            metrics["seconds"]["checkpoint"] = round(writer.take_seconds(), 4)
            if logs:
                logs.append(metrics, result.responses, task, tokenizer)
            traces.remove_old(step - 1)
            display.rl_step(metrics)
            if learner.activations is not None:
                display.memory(learner.activations.take_line())
            if step == first + 2:
                display.memory(compare_memory(run, device))
            writer.start()  # only now: no checkpoint is newer than the metrics
            writer.check()
            stopped = stop.on_any_rank()
        if config.checkpoint.every and saved < step:
            _stage(writer, step, learner, progress)
            writer.start()
        writer.wait()
    if ahead is not None:
        ahead.close()
        remove_steps_from(run, step)  # traces of steps that were prepared and not trained
    save_policy(policy, tokenizer, run / "policy")
    if dist.get_rank() == 0:
        check_not_removed(run)
    return warmed and step >= config.run.steps


def _find_cluster(config: RunConfig, device: torch.device) -> Cluster:
    """Return the machine that steps are planned for; `plan.cluster` is not read where nothing follows plans."""
    launched, num_ranks = launched_rank(), dist.get_world_size()
    cluster = find_cluster(
        config.plan.cluster if config.follows_plans else "auto",
        device,
        num_ranks,
        num_ranks if launched is None else launched.num_local_ranks,
    )
    return replace(cluster, dispatch=config.plan.dispatch_on(cluster))


def _tell_plan_without_effect(config: RunConfig, policy: Policy, cluster: Cluster) -> None:
    """Log, on rank 0, which settings of the plan do nothing in this run."""
    if dist.get_rank() == 0:
        num_experts, num_nodes = policy.num_experts, cluster.num_nodes
        for warning in plan_settings_without_effect(config, num_experts=num_experts, num_nodes=num_nodes):
            _log.warning("%s", warning)


def _make_engine(
    config: RunConfig, rollout: RolloutSettings, policy: Policy, task: Task, tokenizer: Tokenizer, longest: int
) -> tuple[RolloutEngine, Canary | None]:
    """Return the engine, and the canary of its server; before the warm-up, so that nothing is computed in vain."""
    engine = make_engine(
        rollout,
        policy,
        tokenizer,
        seed=config.run.seed,
        shortest=config.algorithm.tail_drop + 1,  # of unfinished responses the last `tail_drop` do not train
        replays_rollout=config.algorithm.replay == "R3",
    )
    canary = check_engine(
        engine,
        rollout,
        longest=longest,
        dtype=config.model.dtype,
        encode_prompt=lambda group: encode_prompt(group, task, tokenizer, config.rollout),
        lora_rank=config.lora.rank,
    )
    return engine, canary


def _build_task_and_policy(
    config: RunConfig, run: Path, device: torch.device, display: TrainingDisplay
) -> tuple[Task, Tokenizer, Policy, int]:
    """Return task, tokenizer, policy, and the most tokens that a prompt and a response have together."""
    if dist.get_rank() == 0:
        for warning in settings_without_effect(config.task):
            _log.warning("%s", warning)
    task = make_task(config.task, config.run.seed, config.evaluation.prompts if config.evaluation.every else 0)
    trusted = config.model.trust_remote_code
    tokenizer = make_tokenizer(config.model.source, task.characters, config.task, trust_remote_code=trusted)
    task, longest_prompt = fit_prompts(task, tokenizer, config.rollout)
    if config.model.path:
        tokens = encode_prompt(0, task, tokenizer, config.rollout)
        whole = tokenizer.decode([*tokens, tokenizer.stop_ids[0]])  # decoding drops a last stop token: this one
        others = task.other_columns if isinstance(task, Prompts) else ()
        display.first_prompt(task.prompt(0).origin, len(tokens), whole, others)
    longest = longest_prompt + config.rollout.max_response
    policy = build_policy(
        config,
        tokenizer.vocab_size,
        run,
        device,
        longest=longest,
        decodes=config.rollout.engine in ("embedded", "serve"),
        samples=config.rollout.engine == "embedded",
    )
    save_activations(policy.trained, config.update.activations)
    if config.model.path and dist.get_rank() == 0:
        warn_beyond_context(longest, policy.meta, config.model.path)
    return task, tokenizer, policy, longest


def warn_beyond_context(longest: int, model: nn.Module, name: str) -> None:
    """Log a warning if the longest prompt and response together exceed the context length of a model.

    longest    tokens
    name       model.path
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if isinstance(context, int) and longest > context:
        _log.warning(
            f"prompt and response have up to {longest} tokens together, but model.path {name!r} was trained for "
            f"{context} (max_position_embeddings): lower rollout.max_response, or ignore this if the model extrapolates"
        )


def model_sizes(policy: Policy) -> dict[str, Any]:
    """Return the sizes of the model that is trained, for config.json."""
    text_config = policy.meta.config.get_text_config()
    sizes = {
        "model_type": text_config.model_type,
        "parameters": sum(parameter.numel() for parameter in policy.meta.parameters()),
        "hidden_size": text_config.hidden_size,
        "num_layers": text_config.num_hidden_layers,
        "num_heads": getattr(text_config, "num_attention_heads", None),
        "vocab_size": text_config.vocab_size,
        "num_experts": policy.num_experts,
    }
    if policy.shape is None:
        return sizes
    layers = {"num_moe_layers": len(policy.layer_ids)} if policy.layer_ids else {}
    return {**sizes, **layers, "experts_per_token": policy.top_k, "expert_width": policy.shape.expert.width}


def _warm_up(
    config: RunConfig, policy: Policy, task: Task, tokenizer: Tokenizer, display: TrainingDisplay, stop: StopRequest
) -> bool:
    """Train on demonstrations; return False if Ctrl-C stopped it before the last warm-up step."""

    begin_stage("warm-up")

    def on_step(step: int, loss: float) -> bool:
        display.warmup_step(step, loss)
        return stop.on_any_rank()

    return warm_up(policy.trained, task, tokenizer, config.warmup, config.update, seed=config.run.seed, on_step=on_step)


def _make_critic(
    config: RunConfig, policy: Policy, run: Path, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer] | None:
    if config.algorithm.advantage != "gae":
        return None
    model = build_critic(config.model, policy, run, device)
    save_activations(model, config.update.activations)
    return model, make_optimizer(model, config.critic.learning_rate, config.update)


def _begin_or_resume(
    learner: Learner, run: Path, device: torch.device, *, resumed: bool
) -> tuple[Learner, Progress, int]:
    """Load the checkpoint of a resumed run; collective.

    Also writes config.json (and reference/, if the loss needs it) and gives the engine the weights of the policy.

    returns   learner with reference policy and planned activations, progress, and the next step
    """
    config, policy = learner.config, learner.policy
    progress, step = _resume(run, learner) if resumed else (Progress(), 0)
    if dist.get_rank() == 0:
        write_config(run, config, model_sizes(policy))  # only now: a checkpoint fits this configuration
    sync_weights(learner.engine, policy, step, learner.canary)
    reference = None
    if config.algorithm.kl_coefficient and config.lora.rank:
        reference = policy.trained  # without its adapters
    elif config.algorithm.kl_coefficient:
        reference = reference_policy(policy, run / "reference", device, settings=config.model, write=not resumed)
    if config.update.offload != "off":
        for model in (learner.critic[0] if learner.critic else None, reference):
            if model is not None and model is not policy.trained:
                move_to_host(model)
    activations = None
    if config.update.activations == "plan":
        slots_gib = config.plan.memory_gib
        activations = PlannedActivations.of_run(run, policy.trained, learner.cluster, policy.shape, slots_gib)
    return replace(learner, reference=reference, activations=activations), progress, step


def _resume(run: Path, learner: Learner) -> tuple[Progress, int]:
    """Load the latest checkpoint, remove what the run folder has of later steps; return progress and next step."""
    loaded = load_checkpoint(run, models=_models(learner))
    assert loaded is not None, "there is a checkpoint, and a damaged one raises"
    check_same_rows(learner.task, loaded.state)
    remove_steps_from(run, loaded.step)
    return Progress.from_state(loaded.state, loaded.responses), loaded.step


def _models(learner: Learner) -> Models:
    models: Models = {"policy": (learner.policy.trained, learner.optimizer)}
    return models if learner.critic is None else {**models, "critic": learner.critic}


def _stage(writer: CheckpointWriter, step: int, learner: Learner, progress: Progress) -> int:
    """Stage a checkpoint, to be written by `writer.start`, and return its step; collective."""
    models = _models(learner)
    with on_device(*(model for model, _ in models.values())):
        writer.stage(
            step,
            models=models,
            responses=[*progress.live, *progress.for_values],
            state={**progress.as_state(), **rows_state(learner.task)},
        )
    return step
