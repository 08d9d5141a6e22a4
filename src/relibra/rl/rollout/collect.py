"""The rollout of a step: select prompts, sample responses, compute rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch.distributed as dist

from relibra.errors import ConfigError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.admission import SampleCursor, check_no_response_lost, plan_admission
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.prompt_lengths import encode_prompt
from relibra.rl.rollout.response import Response, RolloutCost, RolloutEngine, new_response
from relibra.rl.rollout.response_arrays import exchange_responses
from relibra.rl.run.ranks import gather_arrays, gather_json, wait_for_ranks
from relibra.rl.tasks.task import RewardError, Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """Result of a rollout on this rank.

    responses   all that were sampled in this step, by sample id; each is one window longer
    cursor      samples that have not begun, the same on all ranks
    """

    responses: list[Response]
    cost: RolloutCost
    cursor: SampleCursor


def collect(
    live: Sequence[Response],
    *,
    cursor: SampleCursor,
    engine: RolloutEngine,
    task: Task,
    tokenizer: Tokenizer,
    settings: RolloutSettings,
    weight_version: int,
) -> Rollout:
    """Sample a window of every unfinished response, and of new ones in all free slots; collective.

    With `rollout.refill`, further responses begin in slots that become free before the step ends.

    live      unfinished responses of this rank
    cursor    samples that had not begun before this step
    raises    ConfigError for a prompt that is too long
    """
    start = response_starter(task, tokenizer, settings)
    kept = [one.number for one in engine.kept.running] if isinstance(engine, EmbeddedEngine) and engine.kept else []
    active, cursor = admit_responses(live, cursor, start, settings, kept)
    refilled: list[Response] = []

    def spares() -> Iterator[Response]:
        for sample in cursor.spares(dist.get_rank(), dist.get_world_size()):
            refilled.append(start(sample))
            yield refilled[-1]

    windows, cost = engine.generate(
        active,
        window=settings.window_tokens,
        max_response=settings.max_response,
        spare=spares() if settings.refill else None,
    )
    wait_for_ranks()  # responses of a rank may be long
    extended = [
        response.extended(window, weight_version=weight_version, max_response=settings.max_response)
        for response, window in zip([*active, *refilled], windows, strict=True)
    ]
    if settings.refill:
        own = np.array([response.sample_id for response in refilled], dtype=np.int64)
        cursor = cursor.without(np.concatenate(gather_arrays(own)).tolist())
    return Rollout(responses=sorted(extended, key=lambda response: response.sample_id), cost=cost, cursor=cursor)


def compute_rewards(
    responses: Sequence[Response], task: Task, tokenizer: Tokenizer, *, max_response: int, overlong_buffer: int
) -> tuple[list[Response], list[str]]:
    """Return the responses, finished ones with their reward, and the errors of rewards that failed.

    A finished response whose reward failed has none: it is not trained on.
    """
    errors: list[str] = []

    def rewarded(response: Response) -> Response:
        text = tokenizer.decode(response.tokens_n[response.prompt_length :].tolist())
        try:
            value = task.reward(task.prompt(response.group_id), text, stopped=response.finish_reason == "stop")
        except RewardError as error:
            errors.append(str(error))
            return response
        return replace(
            response,
            reward=value + length_penalty(response, max_response=max_response, overlong_buffer=overlong_buffer),
        )

    return [one if one.finish_reason is None else rewarded(one) for one in responses], errors


def check_failed_rewards(errors: Sequence[str], rated: int, *, where: str) -> int:
    """Return how many rewards failed on all ranks, and log the first error; collective.

    errors, rated   of this rank: what failed, and of how many
    raises          ConfigError, on all ranks, where more failed than are allowed; it says `where`, such as "step 3"
    """
    wait_for_ranks()  # a verifier may take long on one rank
    counts_R = gather_json({"failed": len(errors), "rated": rated, "first": errors[0] if errors else ""})
    failed, total = sum(rank["failed"] for rank in counts_R), sum(rank["rated"] for rank in counts_R)
    if not failed:
        return 0
    first = next(rank["first"] for rank in counts_R if rank["first"])
    told = f"{where}: {failed} of {total} rewards failed"
    if failed > allowed_failures(total):
        raise ConfigError(f"{told}, and {allowed_failures(total)} may; the first: {first}")
    if dist.get_rank() == 0:
        _log.warning("%s, these responses are left out; the first: %s", told, first)
    return failed


def allowed_failures(rated: int) -> int:
    """Return how many of so many rewards may fail: a tenth, but one at least, and never all of several.

    >>> [allowed_failures(rated) for rated in (1, 2, 40)]
    [1, 1, 4]
    """
    return min(max(1, rated // 10), max(1, rated - 1))


def admit_responses(
    live: Sequence[Response],
    cursor: SampleCursor,
    start: Callable[[int], Response],
    settings: RolloutSettings,
    kept: Sequence[int] = (),
) -> tuple[list[Response], SampleCursor]:
    """Distribute unfinished and new responses evenly over the ranks; collective if a response can outlast a step.

    live      unfinished responses of this rank
    start     by `response_starter`
    kept      sample ids of responses whose keys and values this rank holds: it gets them, wherever they were trained
    returns   responses of this rank, by sample id, and the samples that have not begun after that
    """
    windowed = settings.window_tokens < settings.max_response
    all_live = [one for of_rank in _gather_windows(live) for one in of_rank] if windowed else []
    kept_R = gather_arrays(np.array(kept, dtype=np.int64)) if settings.keeps_cache else []
    rank_of = {sample: rank for rank, of_rank in enumerate(kept_R) for sample in of_rank.tolist()}
    admission = plan_admission(
        all_live,
        settings.responses_per_step,
        cursor,
        dist.get_world_size(),
        {sample: rank_of[sample] for sample, _ in all_live if sample in rank_of},
    )
    active = list[Response]()
    if windowed:
        active = exchange_responses(list(live), [admission.rank_of[response.sample_id] for response in live])
    active += [start(sample) for sample in admission.begun if admission.rank_of[sample] == dist.get_rank()]
    return sorted(active, key=lambda response: response.sample_id), admission.cursor


def check_live_responses(
    live: Sequence[Response], *, cursor: SampleCursor, finished: int, settings: RolloutSettings
) -> None:
    """Assert at the end of a step, before anything is saved, that no rank has lost a response; collective.

    live       unfinished responses of this rank
    finished   responses of all ranks that ended since the start of the run
    """
    check_no_response_lost(
        started=cursor.started,
        finished=finished,
        live=[one for of_rank in _gather_windows(live) for one in of_rank],
        slots=settings.responses_per_step,
        max_windows=settings.max_windows,
    )


def _gather_windows(live: Sequence[Response]) -> list[list[tuple[int, int]]]:
    """Return (sample id, windows so far) of the unfinished responses of each rank; collective."""
    own = np.array([(response.sample_id, response.windows) for response in live], dtype=np.int64).reshape(-1, 2)
    return [[(sample, windows) for sample, windows in rows.tolist()] for rows in gather_arrays(own)]


def response_starter(task: Task, tokenizer: Tokenizer, settings: RolloutSettings) -> Callable[[int], Response]:
    """Return the function from sample id to new response; a prompt is encoded once for its whole group."""
    per_prompt = settings.responses_per_prompt
    prompt_of = cache(lambda group: encode_prompt(group, task, tokenizer, settings))
    return lambda sample: new_response(sample, sample // per_prompt, prompt_of(sample // per_prompt))


def length_penalty(response: Response, *, max_response: int, overlong_buffer: int) -> float:
    """Return the part of a reward that depends on the length: 0, falling to -1 over the last `overlong_buffer` tokens.

    DAPO, arXiv 2503.14476, eq. 13.
    """
    over = response.length - (max_response - overlong_buffer)
    return -min(over / overlong_buffer, 1.0) if overlong_buffer and over > 0 else 0.0
