"""Supervised warm-up of the built-in model: correct demonstrations first, then demonstrations with random errors.

The policy then knows the task better than it writes, and RL has something to improve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.errors import ConfigError
from relibra.rl.batch.schedule import cut_into_runs
from relibra.rl.config.settings import UpdateSettings, WarmupSettings
from relibra.rl.model.optimizer import clip_gradients, make_optimizer, not_finite
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.run.ranks import largest_over_ranks
from relibra.rl.tasks.task import Demonstrating, Task

RAMP_STEPS = 20
_STREAM = 1
"""First number of the random stream of errors; prompts use others."""
_FIRST_NUMBER = 1 << 40
"""Number of the first prompt: demonstrations use the training stream far beyond the prompts of RL."""

_NOT_TRAINED = -100

Row = tuple[Tensor, Tensor, Tensor]
"""Demonstrations laid end to end: tokens `[1, T]`, positions `[1, T]`, and the target of each token `[T]`."""


def warm_up(
    model: nn.Module,
    task: Task,
    tokenizer: Tokenizer,
    settings: WarmupSettings,
    update: UpdateSettings,
    *,
    seed: int,
    on_step: Callable[[int, float], bool],
) -> bool:
    """Train on demonstrations; return False if stopped before the last step; collective.

    on_step   called on every rank after each step with (step, loss of this rank); True on all ranks stops the warm-up
    raises    ConfigError for a task without demonstrations
    """
    if not settings.steps:
        return True
    if not isinstance(task, Demonstrating):
        raise ConfigError(
            f"warmup.steps is {settings.steps}, but the task has no demonstrations: set warmup.steps=0, and use a "
            "model that already answers some prompts correctly"
        )
    optimizer = make_optimizer(model, settings.learning_rate)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min((step + 1) / RAMP_STEPS, 1 - 0.9 * step / settings.steps)
        pairs = _demonstrations(task, settings, seed, step)
        loss = _backward(model, _rows_of_rank(pairs, tokenizer, update.micro_batch_tokens))
        norm = clip_gradients(model.parameters(), update.max_grad_norm)
        if not math.isfinite(norm):
            raise not_finite(f"warm-up step {step}: the gradient of the policy has the norm {norm}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step(step, loss):
            return step + 1 == settings.steps
    return True


def _backward(model: nn.Module, rows: Sequence[Row]) -> float:
    """Add the gradient of the mean loss over the targets of this rank's rows, and return that loss; collective."""
    targets = sum(int((target_T != _NOT_TRAINED).sum()) for _, _, target_T in rows)
    device, total = next(model.parameters()).device, 0.0
    for i, (tokens_1T, position_1T, target_T) in enumerate(rows):
        if isinstance(model, FSDPModule):  # reduce gradients once, after the last row
            model.set_requires_gradient_sync(i == len(rows) - 1)
        output = model(input_ids=tokens_1T.to(device), position_ids=position_1T.to(device), use_cache=False)
        loss_sum = torch.nn.functional.cross_entropy(
            output.logits[0].float(), target_T.to(device), ignore_index=_NOT_TRAINED, reduction="sum"
        )
        loss = loss_sum / targets
        loss.backward()
        total += float(loss.detach())
    return total


def _demonstrations(task: Demonstrating, settings: WarmupSettings, seed: int, step: int) -> list[tuple[str, str]]:
    """Return (prompt, answer) of all demonstrations of a step; the error rate grows from the middle of the warm-up."""
    assert isinstance(task, Task), "a task that demonstrates has prompts"
    rng = np.random.default_rng([seed, _STREAM, step])
    error_rate = settings.error_rate * max(0.0, 2 * (step + 1) / settings.steps - 1)
    pairs = []
    for i in range(settings.batch):
        prompt = task.prompt(_FIRST_NUMBER + step * settings.batch + i)
        assert isinstance(prompt.text, str), "tasks with demonstrations have plain prompts"
        pairs.append((prompt.text, task.demonstrate(prompt, rng, error_rate=error_rate)))
    return pairs


def _rows_of_rank(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_tokens: int) -> list[Row]:
    """Return this rank's share of the demonstrations in rows of at most `max_tokens`; collective.

    A longer demonstration gets a row of its own. All ranks return the same number of rows, because they run the model
    together.
    """
    share = pairs[dist.get_rank() :: dist.get_world_size()] or pairs[:1]
    encoded = [(tokenizer.encode(prompt), tokenizer.encode_response(answer)) for prompt, answer in share]
    runs = cut_into_runs([len(prompt) + len(answer) for prompt, answer in encoded], max_tokens)
    filler = _row([([tokenizer.pad_id], [])])  # trains nothing
    return [_row([encoded[i] for i in run]) for run in runs] + [filler] * (largest_over_ranks(len(runs)) - len(runs))


def _row(encoded: Sequence[tuple[list[int], list[int]]]) -> Row:
    """Lay prompts and their answers end to end; only answer tokens are targets."""
    tokens, positions, targets = list[int](), list[int](), list[int]()
    for prompt, answer in encoded:
        tokens += [*prompt, *answer]
        positions += range(len(prompt) + len(answer))
        targets += [*[_NOT_TRAINED] * (len(prompt) - 1), *answer, _NOT_TRAINED]
    return torch.tensor([tokens]), torch.tensor([positions]), torch.tensor(targets)
