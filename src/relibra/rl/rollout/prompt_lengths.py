"""Prompts longer than `rollout.max_prompt`: left out of a file's training prompts and of evaluations, else refused."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from relibra.errors import ConfigError
from relibra.rl.config.rollout_settings import RolloutSettings
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.run.ranks import gather_arrays, largest_over_ranks
from relibra.rl.tasks.prompts import Prompts
from relibra.rl.tasks.task import Prompt, Task

_log = logging.getLogger(__name__)


def encode_prompt(group: int, task: Task, tokenizer: Tokenizer, settings: RolloutSettings) -> list[int]:
    """Return the ids of a prompt; raises ConfigError for one without tokens, or one that is too long."""
    prompt = task.prompt(group)
    tokens = _encode(prompt, tokenizer)
    _check_length(prompt, group, len(tokens), settings.max_prompt)
    return tokens


def encode_held_out(
    task: Task, tokenizer: Tokenizer, settings: RolloutSettings, num_prompts: int
) -> list[tuple[Prompt, list[int]]]:
    """Return the held-out prompts with their ids, without long ones.

    raises    ConfigError for a prompt without tokens, and where none is left
    """
    found = []
    prompts = task.evaluation_prompts(num_prompts)
    for number, prompt in enumerate(prompts):
        tokens = _encode(prompt, tokenizer)
        if len(tokens) > settings.max_prompt:
            continue
        _check_length(prompt, number, len(tokens), settings.max_prompt)
        found.append((prompt, tokens))
    if prompts and not found:
        raise ConfigError(
            f"all {len(prompts)} prompts of the evaluation have more tokens than rollout.max_prompt "
            f"{settings.max_prompt:,}: set a larger one, or evaluation.every=0"
        )
    return found


def fit_prompts(task: Task, tokenizer: Tokenizer, settings: RolloutSettings) -> tuple[Task, int]:
    """Return a task without its prompts that are too long, and the most tokens of a prompt; collective.

    Each rank encodes its share of the file. The most is rollout.max_prompt where some are left out, 0 without a file.

    raises    ConfigError, on all ranks, where no prompt is left; and for one without tokens, with its file and line
    """
    if not isinstance(task, Prompts):
        return task, 0
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    prompts = map(task.row_prompt, task.training_rows[rank::num_ranks].tolist())
    own = np.array([len(_encode(prompt, tokenizer)) for prompt in prompts], dtype=np.int64)
    length_r = np.zeros(task.num_training, dtype=np.int64)
    for other, lengths in enumerate(gather_arrays(own)):
        length_r[other::num_ranks] = lengths
    over_r = length_r > settings.max_prompt
    if not length_r.all():
        place = int(np.argmin(length_r))
        first = task.row_prompt(int(task.training_rows[place]))
        _check_length(first, place, int(length_r[place]), settings.max_prompt)
    if over_r.any():
        task = _without(task, over_r, settings, tell=rank == 0)
    least = settings.max_prompt if over_r.any() else 0
    return task, largest_over_ranks(int(length_r[~over_r].max(initial=least)))


def _without(task: Prompts, over_r: np.ndarray, settings: RolloutSettings, *, tell: bool) -> Prompts:
    """Return the prompts to train on, and say how many are left out."""
    first = task.row_prompt(int(task.training_rows[int(np.argmax(over_r))])).origin
    told = (
        f"{over_r.sum():,} of {len(over_r):,} prompts have more tokens than rollout.max_prompt {settings.max_prompt:,}"
    )
    if over_r.all():
        raise ConfigError(f"{told}, and none is left to train on (the first: {first}): set a larger one")
    if tell:
        _log.warning("%s and are left out; the first: %s", told, first)
    return replace(task, training_rows=task.training_rows[~over_r])


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt; an error names its file and line."""
    try:
        return tokenizer.encode(prompt.text, **prompt.template)
    except ConfigError as error:
        raise ConfigError(f"{prompt.origin}: {error}" if prompt.origin else str(error)) from error


def _check_length(prompt: Prompt, group: int, length: int, max_prompt: int) -> None:
    if not 0 < length <= max_prompt:
        raise ConfigError(
            f"{prompt.origin or f'prompt {group} of the task'} has {length} tokens: allowed are 1 to {max_prompt} "
            "(rollout.max_prompt); remove it from the file, or raise the limit in a new run"
        )
