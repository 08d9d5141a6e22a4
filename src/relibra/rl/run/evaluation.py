"""Evaluation: held-out prompts, one response each, by the policy as it is."""

from __future__ import annotations

import torch
import torch.distributed as dist

from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.response import RolloutEngine, new_response
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.tasks.task import Task

_FIRST_SAMPLE = 1 << 50
"""Ids of evaluation samples, far beyond those of training: the same draws at every evaluation."""


def evaluate(engine: RolloutEngine, task: Task, tokenizer: Tokenizer, config: RunConfig) -> dict[str, float]:
    """Answer the held-out prompts and return mean reward and length; the same on all ranks; collective."""
    prompts = task.evaluation_prompts(config.evaluation.prompts)
    own = list(enumerate(prompts))[dist.get_rank() :: dist.get_world_size()]
    started = [new_response(_FIRST_SAMPLE + i, i, tokenizer.encode(prompt.text)) for i, prompt in own]
    longest = config.rollout.max_response
    windows, _ = engine.generate(started, window=longest, max_response=longest)
    rewards = [
        task.reward(prompt, tokenizer.decode(window.tokens_w.tolist()), stopped=window.stopped)
        for (_, prompt), window in zip(own, windows, strict=True)
    ]
    lengths = [len(window.tokens_w) for window in windows]
    total, length, count = sum_over_ranks(
        torch.tensor([sum(rewards), sum(lengths), len(own)], dtype=torch.float64)
    ).tolist()
    return {"reward": total / max(1, count), "response_length": length / max(1, count)}
