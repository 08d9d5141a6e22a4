"""The main job on one rank: warm-up, RL steps, and the policy in the end. A thin composition of the other files."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from relibra.rl.config import RunConfig
from relibra.rl.policy import build_policy
from relibra.rl.progress import TrainingProgress
from relibra.rl.ranks import largest_over_ranks
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.run_folder import MetricsLog, save_policy
from relibra.rl.step import rl_step
from relibra.rl.tasks.arithmetic import CHARACTERS, STOP
from relibra.rl.tokenizer import CharacterTokenizer
from relibra.rl.warmup import warm_up


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

    Every rank passes the same configuration and run folder. After a stop the folder holds all finished steps and the
    policy as it was after the last of them.
    """
    torch.set_num_threads(config.parallel.threads_per_rank)
    stop = StopRequest()
    with TrainingProgress(
        warmup_steps=config.warmup.steps, rl_steps=config.run.steps, enabled=dist.get_rank() == 0
    ) as progress:
        stop.on_ask = progress.stopping
        return _train(config, run, device, progress, stop)


def _train(config: RunConfig, run: Path, device: torch.device, progress: TrainingProgress, stop: StopRequest) -> bool:
    tokenizer = CharacterTokenizer(CHARACTERS, STOP)
    policy = build_policy(config.model, tokenizer.vocab_size, config.run.seed, run, device)

    def after_warmup_step(step: int, loss: float) -> bool:
        progress.warmup_step(step, loss)
        return stop.agreed()

    warm_up(policy.trained, tokenizer, config, after_warmup_step)
    policy.sync()
    optimizer = torch.optim.AdamW(
        policy.trained.parameters(), lr=config.update.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    log = MetricsLog(run) if dist.get_rank() == 0 else None
    stopped = stopped_in_warmup = stop.agreed()
    step = 0
    while step < config.run.steps and not stopped:
        engine = EmbeddedEngine(
            model=policy.copy,
            weight_version=step,
            pad_id=tokenizer.pad_id,
            stop_id=tokenizer.stop_id,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
        )
        metrics = rl_step(
            step, policy=policy, engine=engine, optimizer=optimizer, tokenizer=tokenizer, config=config, run=run
        )
        if log:
            log.append(metrics)
        progress.rl_step(metrics)
        step += 1
        stopped = stop.agreed()
    if log:
        log.close()
        save_policy(run, policy.copy)
    return step == config.run.steps and not stopped_in_warmup
