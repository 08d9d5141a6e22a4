"""The rollout of a step: who is served, what they say, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from relibra.errors import ConfigError
from relibra.rl.algorithms.advantages import overlong_penalty
from relibra.rl.config import RunConfig
from relibra.rl.ranks import gather_arrays
from relibra.rl.rollout.exchange import exchange_responses
from relibra.rl.rollout.pool import check_pool, plan_admission
from relibra.rl.rollout.response import Response, RolloutCost, RolloutEngine, new_response
from relibra.rl.tasks.task import Task
from relibra.rl.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """What came out of a rollout on this rank.

    responses     all that were under way, by sample id; each has a window more
    next_sample   id of the first response that has not begun, the same on all ranks
    """

    responses: list[Response]
    cost: RolloutCost
    next_sample: int


def collect(
    live: Sequence[Response],
    *,
    started: int,
    finished: int,
    engine: RolloutEngine,
    task: Task,
    tokenizer: Tokenizer,
    config: RunConfig,
    weight_version: int,
) -> Rollout:
    """Go on with unfinished responses, and begin as many new ones as places are free; collective.

    live                unfinished responses of this rank
    started, finished   responses of all ranks since the start of the run
    raises              ConfigError for a prompt that is too long
    """
    active, next_sample = _admit(live, started, finished, task, tokenizer, config)
    rollout = config.rollout
    windows, cost = engine.generate(active, window=rollout.window_tokens, max_response=rollout.max_response)
    extended = [
        response.extended(window, weight_version=weight_version, max_response=rollout.max_response)
        for response, window in zip(active, windows, strict=True)
    ]
    return Rollout(responses=extended, cost=cost, next_sample=next_sample)


def rate(responses: Sequence[Response], task: Task, tokenizer: Tokenizer, config: RunConfig) -> list[Response]:
    """Return the responses, finished ones with their reward.

    raises   ConfigError where a reward function fails
    """
    return [
        response
        if response.finish_reason is None
        else replace(response, reward=_reward(response, task, tokenizer, config))
        for response in responses
    ]


def _admit(
    live: Sequence[Response], started: int, finished: int, task: Task, tokenizer: Tokenizer, config: RunConfig
) -> tuple[list[Response], int]:
    """Deal unfinished and new responses evenly over the ranks."""
    own = np.array([(response.sample_id, response.windows) for response in live], dtype=np.int64).reshape(-1, 2)
    everybody = [(int(sample), int(windows)) for sample, windows in np.concatenate(gather_arrays(own))]
    slots, max_windows = config.responses_per_step, config.rollout.max_response // config.rollout.window_tokens
    check_pool(started=started, finished=finished, live=everybody, slots=slots, max_windows=max_windows)
    admission = plan_admission(everybody, slots, started, dist.get_world_size())
    active = exchange_responses(live, [admission.rank_of[response.sample_id] for response in live])
    rank, per_prompt = dist.get_rank(), config.rollout.responses_per_prompt
    fresh = [sample for sample in admission.fresh if admission.rank_of[sample] == rank]
    prompts = {group: _encode(group, task, tokenizer, config) for group in {sample // per_prompt for sample in fresh}}
    active += [new_response(sample, sample // per_prompt, prompts[sample // per_prompt]) for sample in fresh]
    return sorted(active, key=lambda response: response.sample_id), admission.next_sample


def _encode(group: int, task: Task, tokenizer: Tokenizer, config: RunConfig) -> list[int]:
    tokens = tokenizer.encode(task.prompt(group).text)
    if not 0 < len(tokens) <= config.rollout.max_prompt:
        raise ConfigError(
            f"prompt {group} of the task {config.task.name!r} has {len(tokens)} tokens: allowed are 1 to "
            f"{config.rollout.max_prompt} (rollout.max_prompt); leave it out of the file, or raise the limit"
        )
    return tokens


def _reward(response: Response, task: Task, tokenizer: Tokenizer, config: RunConfig) -> float:
    text = tokenizer.decode(response.tokens_n[response.prompt_length :].tolist())
    value = task.reward(task.prompt(response.group_id), text, stopped=response.finish_reason == "stop")
    return value + length_penalty(response, config)


def length_penalty(response: Response, config: RunConfig) -> float:
    """Return the part of a reward that is for the length (`algorithm.overlong_buffer`), 0 or below."""
    return float(
        overlong_penalty(
            torch.tensor([response.length]),
            max_response=config.rollout.max_response,
            buffer=config.algorithm.overlong_buffer,
        )
    )
