"""Supervised warm-up: the policy learns what an answer looks like and how to find it, then a tired teacher's slips.

So it knows better than it writes, which is what RL can then bring out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.errors import ConfigError
from relibra.rl.batch.schedule import own_micro_batches
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.optimizer import clip_gradients, make_optimizer
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.run.ranks import largest_over_ranks
from relibra.rl.tasks.task import Demonstrating, Task

RAMP_STEPS = 20
_STREAM = 1
"""Random stream of the slips, apart from that of the prompts."""
_FIRST_NUMBER = 1 << 40
"""Demonstrations answer prompts of the same stream, far beyond those that RL comes to."""

_NOT_TRAINED = -100


def warm_up(
    model: nn.Module, task: Task, tokenizer: Tokenizer, config: RunConfig, on_step: Callable[[int, float], bool]
) -> bool:
    """Train on demonstrations; return False when it was stopped before the last step; collective.

    on_step   called on every rank after each step with (step, loss of this rank); True stops, on all ranks or on none
    raises    ConfigError for a task that cannot demonstrate
    """
    settings = config.warmup
    if not settings.steps:
        return True
    if not isinstance(task, Demonstrating):
        raise ConfigError(
            f"warmup.steps is {settings.steps}, and the task {config.task.name!r} has no demonstrations: set "
            "warmup.steps=0, and start from a model that can answer now and then"
        )
    optimizer = make_optimizer(model, settings.learning_rate, weight_decay=0.0)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min((step + 1) / RAMP_STEPS, 1 - 0.9 * step / settings.steps)
        loss = _backward(model, _demonstrations(task, config, tokenizer, step))
        clip_gradients(
            model.parameters(), config.update.max_grad_norm, what=f"the policy's gradient in warm-up step {step}"
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step(step, loss):
            return step + 1 == settings.steps
    return True


Row = tuple[Tensor, Tensor, Tensor]
"""Demonstrations laid end to end: tokens and positions `[1, T]`, and what follows each token `[T]`."""


def _backward(model: nn.Module, rows: Sequence[Row]) -> float:
    """Add the gradient of the mean loss over the targets of all rows of this rank, and return that loss; collective."""
    targets = sum(int((target_T != _NOT_TRAINED).sum()) for _, _, target_T in rows)
    device, total = next(model.parameters()).device, 0.0
    for i, (tokens_1T, position_1T, target_T) in enumerate(rows):
        if isinstance(model, FSDPModule):  # gradients are reduced once, after the last row
            model.set_requires_gradient_sync(i == len(rows) - 1)
        output = model(input_ids=tokens_1T.to(device), position_ids=position_1T.to(device), use_cache=False)
        loss_sum = torch.nn.functional.cross_entropy(
            output.logits[0].float(), target_T.to(device), ignore_index=_NOT_TRAINED, reduction="sum"
        )
        loss = loss_sum / targets
        loss.backward()
        total += float(loss.detach())
    return total


def _demonstrations(task: Demonstrating, config: RunConfig, tokenizer: Tokenizer, step: int) -> list[Row]:
    """Return this rank's share of a step's demonstrations in rows of at most `update.micro_batch_tokens`; collective.

    As many rows as every other rank has, for all of them run the model together; a longer demonstration goes alone.
    """
    assert isinstance(task, Task), "a task that demonstrates has prompts"
    rng = np.random.default_rng([config.run.seed, _STREAM, step])
    slip = config.warmup.slip * max(0.0, 2 * (step + 1) / config.warmup.steps - 1)
    pairs = []
    for i in range(config.warmup.batch):
        prompt = task.prompt(_FIRST_NUMBER + step * config.warmup.batch + i)
        pairs.append((prompt.text, task.demonstrate(prompt, rng, slip=slip)))
    share = pairs[dist.get_rank() :: dist.get_world_size()] or pairs[:1]
    encoded = [(tokenizer.encode(text), tokenizer.encode_response(answer)) for text, answer in share]
    lengths = [len(asked) + len(answered) for asked, answered in encoded]
    runs = own_micro_batches(lengths, config.update.micro_batch_tokens)
    filler = _row([([tokenizer.pad_id], [])])  # trains nothing
    return [_row([encoded[i] for i in run]) for run in runs] + [filler] * (largest_over_ranks(len(runs)) - len(runs))


def _row(encoded: Sequence[tuple[list[int], list[int]]]) -> Row:
    """Lay prompts with their answers end to end."""
    tokens: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for asked, answered in encoded:
        tokens += [*asked, *answered]
        positions += range(len(asked) + len(answered))
        targets += [*[_NOT_TRAINED] * (len(asked) - 1), *answered, _NOT_TRAINED]
    return torch.tensor([tokens]), torch.tensor([positions]), torch.tensor(targets)
