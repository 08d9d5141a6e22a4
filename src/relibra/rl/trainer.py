"""The main job on one rank: warm-up, RL steps, checkpoints, the policy in the end; a thin composition of the rest."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from relibra.environment import launched_rank
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.critic import build_critic
from relibra.rl.model.optimizer import make_optimizer
from relibra.rl.model.policy import Policy, build_policy
from relibra.rl.model.reference import reference_policy
from relibra.rl.model.tokenizer import Tokenizer, make_tokenizer
from relibra.rl.rollout.collect import longest_prompt
from relibra.rl.rollout.engines import make_engine, sync_weights
from relibra.rl.run.checkpoint import load_checkpoint, save_checkpoint
from relibra.rl.run.display import TrainingProgress
from relibra.rl.run.evaluation import evaluate
from relibra.rl.run.ranks import broadcast_json, largest_over_ranks
from relibra.rl.run.run_folder import (
    MetricsLog,
    SamplesLog,
    forget_steps_from,
    has_checkpoint,
    held_run_folder,
    save_policy,
    write_config,
)
from relibra.rl.step import Learner, Progress, Trained, rl_step
from relibra.rl.tasks.make import make_task, without_effect
from relibra.rl.tasks.task import Task
from relibra.rl.toy.warmup import warm_up

_log = logging.getLogger(__name__)


class StopRequest:
    """Remembers Ctrl-C (SIGINT), so that all ranks can stop together after a whole step."""

    def __init__(self) -> None:
        """Take over SIGINT for the rest of this process, one held back since its start included."""
        self._asked = False
        self.on_ask: Callable[[], None] = lambda: None
        signal.signal(signal.SIGINT, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def agreed(self) -> bool:
        """Return whether any rank was asked to stop; collective."""
        return largest_over_ranks(int(self._asked)) > 0

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True
        self.on_ask()


def train_rank(config: RunConfig, run: Path, device: torch.device) -> bool:
    """Train as one of the joined ranks; return False when stopped by Ctrl-C before the last step; collective.

    Every rank passes the same configuration and run folder. Where the folder has a checkpoint, the run goes on from it.
    After a stop the folder holds all finished steps, a checkpoint and the policy as it was after the last of them.
    """
    torch.set_num_threads(config.parallel.threads_per_rank)
    stop = StopRequest()
    rank_0 = dist.get_rank() == 0
    with (
        held_run_folder(run) if rank_0 else nullcontext(),
        TrainingProgress(warmup_steps=config.warmup.steps, rl_steps=config.run.steps, enabled=rank_0) as progress,
    ):
        stop.on_ask = progress.stopping
        return _train(config, run, device, progress, stop)


def _train(config: RunConfig, run: Path, device: torch.device, display: TrainingProgress, stop: StopRequest) -> bool:
    rank_0 = dist.get_rank() == 0
    for sentence in without_effect(config.task) if rank_0 else ():
        _log.warning("%s", sentence)
    task = make_task(config.task, config.run.seed, config.evaluation.prompts if config.evaluation.every else 0)
    tokenizer = make_tokenizer(config.model.path, task.characters)
    longest = longest_prompt(task, tokenizer, config.rollout.max_prompt) + config.rollout.max_response
    policy = build_policy(config, tokenizer.vocab_size, run, device)
    _warn_beyond_context(longest, policy.copy, config.model.path)
    learner, step, warm = _begin_or_resume(config, run, device, policy, task, tokenizer, display, stop)
    log = MetricsLog(run, step) if rank_0 else None
    samples = SamplesLog(run) if rank_0 else None
    stopped, reached, saved = stop.agreed(), False, step
    while step < config.run.steps and not stopped and not reached:
        metrics, responses = rl_step(step, learner, config, run)
        metrics["evaluation"] = None
        if config.evaluation.every and (step + 1) % config.evaluation.every == 0:
            found = evaluate(learner.engine, task, tokenizer, config)
            metrics["evaluation"] = found
            reached = config.evaluation.stop_at is not None and found["reward"] >= config.evaluation.stop_at
        if log and samples:
            log.append(metrics)
            samples.append(step, responses, task, tokenizer)
        display.rl_step(metrics)
        step += 1
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            saved = _save(config, run, step, learner)
        stopped = stop.agreed()
    if config.checkpoint.every and saved < step:
        _save(config, run, step, learner)
    if log and samples:
        log.close()
        samples.close()
    save_policy(run, policy, tokenizer)
    return warm and (step >= config.run.steps or reached)


def _warn_beyond_context(longest: int, model: nn.Module, name: str | None) -> None:
    """Say so where the longest prompt and response together outgrow what a model was made for; rank 0 only.

    name    model.path; None: the built-in model, which is made for the run
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if name is not None and isinstance(context, int) and longest > context and dist.get_rank() == 0:
        _log.warning(
            "prompts and responses may have %d tokens together, and model.path %r was made for %d "
            "(max_position_embeddings): set a smaller rollout.max_response, or ignore this if it goes further",
            longest,
            name,
            context,
        )


def _begin_or_resume(
    config: RunConfig,
    run: Path,
    device: torch.device,
    policy: Policy,
    task: Task,
    tokenizer: Tokenizer,
    display: TrainingProgress,
    stop: StopRequest,
) -> tuple[Learner, int, bool]:
    """Warm up, or load the latest checkpoint.

    returns   what trains, the step to go on with, and False where the warm-up was stopped before its end
    """
    warm = True
    from_checkpoint = broadcast_json(has_checkpoint(run) if dist.get_rank() == 0 else None)
    if not from_checkpoint:
        warm = warm_up(
            policy.trained,
            task,
            tokenizer,
            config.warmup,
            config.update,
            seed=config.run.seed,
            on_step=_warmup_hook(display, stop),
        )
    optimizer = make_optimizer(policy.trained, config.update.learning_rate, config.update.weight_decay)
    critic_model = build_critic(config, policy, run, device)
    critic = None
    if critic_model is not None:
        critic_optimizer = make_optimizer(critic_model, config.critic.learning_rate, config.update.weight_decay)
        critic = Trained(model=critic_model, optimizer=critic_optimizer)
    progress, step = Progress(), 0
    if from_checkpoint:
        loaded = load_checkpoint(run, models=_models(policy, optimizer, critic))
        assert loaded is not None, "there is a checkpoint, and a damaged one raises"
        progress, step = Progress.from_state(loaded.state, loaded.responses), loaded.step
        forget_steps_from(run, step)
        if dist.get_rank() == 0:
            write_config(run, config)  # now that it has proved to fit
        display.resumed(step)
    engine = make_engine(
        config.rollout,
        policy,
        tokenizer,
        seed=config.run.seed,
        shortest=config.algorithm.tail_drop + 1,  # fewer tokens of an unfinished response train nothing
        replays_rollout=config.algorithm.replay == "R3",
    )
    sync_weights(engine, policy, config.rollout.server_weights, step)
    reference = None
    if config.algorithm.kl_coefficient:
        reference = reference_policy(policy, run / "reference", device, dtype=config.model.dtype, begun=from_checkpoint)
    learner = Learner(
        policy=policy,
        optimizer=optimizer,
        critic=critic,
        reference=reference,
        engine=engine,
        task=task,
        tokenizer=tokenizer,
        progress=progress,
        ranks_per_node=_ranks_per_node(),
    )
    if not from_checkpoint and config.checkpoint.every and warm:
        _save(config, run, 0, learner)  # a warm-up is not made twice
    return learner, step, warm


def _warmup_hook(display: TrainingProgress, stop: StopRequest) -> Callable[[int, float], bool]:
    def after_step(step: int, loss: float) -> bool:
        display.warmup_step(step, loss)
        return stop.agreed()

    return after_step


def _models(
    policy: Policy, optimizer: torch.optim.Optimizer, critic: Trained | None
) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {"policy": (policy.trained, optimizer)}
    if critic is not None:
        models["critic"] = (critic.model, critic.optimizer)
    return models


def _save(config: RunConfig, run: Path, step: int, learner: Learner) -> int:
    progress = learner.progress
    save_checkpoint(
        run,
        step,
        models=_models(learner.policy, learner.optimizer, learner.critic),
        responses=[*progress.live, *progress.for_values],
        state=progress.as_state(),
        keep=config.checkpoint.keep,
    )
    return step


def _ranks_per_node() -> int:
    """Return how many ranks share this machine, as `torchrun` says it; without it all do."""
    launched = launched_rank()
    return dist.get_world_size() if launched is None else launched.num_local_ranks
