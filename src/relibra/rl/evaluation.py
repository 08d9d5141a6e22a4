"""Evaluation: one response of the current policy to each held-out prompt."""

from __future__ import annotations

import torch
import torch.distributed as dist

from relibra.rl.model.host_weights import idle_while_sampling
from relibra.rl.rollout.collect import check_failed_rewards
from relibra.rl.rollout.prompt_lengths import encode_held_out
from relibra.rl.rollout.response import new_response
from relibra.rl.run.ranks import begin_stage, sum_over_ranks, wait_for_ranks
from relibra.rl.step import Learner
from relibra.rl.tasks.task import RewardError

_FIRST_SAMPLE = 1 << 50
"""First sample id, far beyond those of training; fixed, so that every evaluation uses the same random numbers."""


def evaluate(learner: Learner) -> dict[str, float]:
    """Return mean reward and response length on the held-out prompts; the same on all ranks; collective.

    raises    ConfigError if more rewards failed than are allowed, or all prompts are too long
    """
    task, tokenizer, settings = learner.task, learner.tokenizer, learner.config.rollout
    with idle_while_sampling(learner.policy.trained, learner.config.update):
        begin_stage("evaluation")
        encoded = list(enumerate(encode_held_out(task, tokenizer, settings, learner.config.evaluation.prompts)))
        own = encoded[dist.get_rank() :: dist.get_world_size()]
        started = [new_response(_FIRST_SAMPLE + i, i, tokens) for i, (_, tokens) in own]
        longest = settings.max_response
        windows, _ = learner.engine.generate(started, window=longest, max_response=longest)
        wait_for_ranks()
        rewards, errors = list[float](), list[str]()
        for (_, (prompt, _)), window in zip(own, windows, strict=True):
            try:
                rewards.append(task.reward(prompt, tokenizer.decode(window.tokens_w.tolist()), stopped=window.stopped))
            except RewardError as error:
                errors.append(str(error))
        failed = check_failed_rewards(errors, len(own), where="evaluation")
        lengths = [len(window.tokens_w) for window in windows]
        sums = torch.tensor([sum(rewards), sum(lengths), len(own)], dtype=torch.float64)
        total, length, count = sum_over_ranks(sums).tolist()
    return {"reward": total / max(1, count - failed), "response_length": length / max(1, count)}
