"""The rollout of a step: who is served, what they say, what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from relibra.errors import ConfigError
from relibra.rl.algorithms.advantages import overlong_penalty
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.admission import Fresh, check_pool, plan_admission
from relibra.rl.rollout.response import Response, RolloutCost, RolloutEngine, new_response
from relibra.rl.rollout.response_tensors import exchange_responses
from relibra.rl.run.ranks import gather_arrays, largest_over_ranks
from relibra.rl.tasks.prompts import Prompts
from relibra.rl.tasks.task import Task

MOST_LOOKED_AT = 100_000
"""Prompts of a file that are encoded before a run starts, the first that it takes; later ones when their turn comes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """What came out of a rollout on this rank.

    responses   all that were under way, by sample id; each has a window more
    fresh       what has not begun, the same on all ranks
    """

    responses: list[Response]
    cost: RolloutCost
    fresh: Fresh


def collect(
    live: Sequence[Response],
    *,
    fresh: Fresh,
    engine: RolloutEngine,
    task: Task,
    tokenizer: Tokenizer,
    config: RunConfig,
    weight_version: int,
) -> Rollout:
    """Go on with unfinished responses, and begin as many new ones as places are free; collective.

    With `rollout.refill` more begin where places fall free before the step ends.

    live      unfinished responses of this rank
    fresh     what had not begun before this step
    raises    ConfigError for a prompt that is too long
    """
    begin = _beginner(task, tokenizer, config)
    active, fresh = _admit(live, fresh, begin, config)
    rollout, refilled = config.rollout, list[Response]()

    def spares() -> Iterator[Response]:
        for sample in fresh.spares(dist.get_rank(), dist.get_world_size()):
            refilled.append(begin(sample))
            yield refilled[-1]

    windows, cost = engine.generate(
        active,
        window=rollout.window_tokens,
        max_response=rollout.max_response,
        spare=spares() if rollout.refill else None,
    )
    extended = [
        response.extended(window, weight_version=weight_version, max_response=rollout.max_response)
        for response, window in zip([*active, *refilled], windows, strict=True)
    ]
    if rollout.refill:
        own = np.array([response.sample_id for response in refilled], dtype=np.int64)
        fresh = fresh.without(np.concatenate(gather_arrays(own)).tolist())
    return Rollout(responses=sorted(extended, key=lambda response: response.sample_id), cost=cost, fresh=fresh)


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
    live: Sequence[Response], fresh: Fresh, begin: Callable[[int], Response], config: RunConfig
) -> tuple[list[Response], Fresh]:
    """Deal unfinished and new responses evenly over the ranks."""
    admission = plan_admission(_of_all(live), config.responses_per_step, fresh, dist.get_world_size())
    active = exchange_responses(live, [admission.rank_of[response.sample_id] for response in live])
    active += [begin(sample) for sample in admission.begun if admission.rank_of[sample] == dist.get_rank()]
    return sorted(active, key=lambda response: response.sample_id), admission.fresh


def check_live(live: Sequence[Response], *, fresh: Fresh, finished: int, config: RunConfig) -> None:
    """Assert at the end of a step, before anything of it is saved, that no response of any rank is lost; collective.

    live       unfinished responses of this rank
    finished   responses of all ranks that ended since the start of the run
    """
    check_pool(
        started=fresh.started,
        finished=finished,
        live=_of_all(live),
        slots=config.responses_per_step,
        max_windows=config.rollout.max_windows,
    )


def _of_all(live: Sequence[Response]) -> list[tuple[int, int]]:
    """Return (sample id, windows so far) of the unfinished responses of all ranks; collective."""
    own = np.array([(response.sample_id, response.windows) for response in live], dtype=np.int64).reshape(-1, 2)
    return [(int(sample), int(windows)) for sample, windows in np.concatenate(gather_arrays(own))]


def _beginner(task: Task, tokenizer: Tokenizer, config: RunConfig) -> Callable[[int], Response]:
    """Return what makes a new response of a sample id; a prompt is encoded once for its whole group."""
    per_prompt = config.rollout.responses_per_prompt
    prompt_of = cache(lambda group: _encode(group, task, tokenizer, config))
    return lambda sample: new_response(sample, sample // per_prompt, prompt_of(sample // per_prompt))


def _encode(group: int, task: Task, tokenizer: Tokenizer, config: RunConfig) -> list[int]:
    prompt = task.prompt(group)
    tokens = tokenizer.encode(prompt.text)
    if not 0 < len(tokens) <= config.rollout.max_prompt:
        raise ConfigError(
            f"{prompt.origin or f'prompt {group}'} of the task {config.task.name!r} has {len(tokens)} tokens: allowed "
            f"are 1 to {config.rollout.max_prompt} (rollout.max_prompt); leave it out of the file, or raise the limit "
            "in a new run"
        )
    return tokens


def longest_prompt(task: Task, tokenizer: Tokenizer, config: RunConfig) -> int:
    """Encode the rows of a file once, each rank its share, so that a long one ends the run before it starts.

    Collective.

    returns   tokens of the longest; 0 for tasks without a file
    raises    ConfigError naming file and line where a prompt has more tokens than allowed
    """
    if not isinstance(task, Prompts):
        return 0
    own = range(dist.get_rank(), min(task.num_training, MOST_LOOKED_AT), dist.get_world_size())
    return largest_over_ranks(max((len(_encode(number, task, tokenizer, config)) for number in own), default=0))


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
