"""Update of the value model on finished responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.rl.algorithms.terms import response_sizes
from relibra.rl.algorithms.value_loss import clipped_value_loss
from relibra.rl.batch.step_plan import own_mini_batches
from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.config.settings import CriticSettings, UpdateSettings
from relibra.rl.model.critic import token_values
from relibra.rl.model.optimizer import StepCount, step_or_skip
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.update.credit import make_value_batches, returns_of
from relibra.rl.update.gradient_reduction import each_micro_batch

CLIP_LOW, CLIP_HIGH = 0.5, 0.6
"""A new value is clipped at the old one - CLIP_LOW, and at the old one + CLIP_HIGH."""


def update_values(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    finished: Sequence[Response],
    settings: CriticSettings,
    update: UpdateSettings,
    *,
    by_group: bool,
    seed: int,
    responses_per_step: int,
    count: StepCount,
    num_ranks: int,
    shares_prompts: bool = False,
) -> tuple[float, StepCount, int]:
    """Train the value model on finished responses, all their windows; collective.

    The target of every token is the reward at the end (Monte Carlo, lambda 1). Mini-batches are drawn at random, as the
    policy's are: in the order of samples, the first one would always have the longest responses.

    finished         of this rank, with reward and recorded values
    by_group, seed   as of `own_mini_batches`
    count            optimizer steps made before
    shares_prompts   of `make_value_batches`
    returns          mean loss over mini-batches on all ranks, `count` after it, and the optimizer steps skipped
    """
    parts = own_mini_batches(finished, update.mini_batches, by_group=by_group, seed=seed)
    totals = sum_over_ranks(torch.tensor([len(part) for part in parts])).tolist()
    nominal = responses_per_step // update.mini_batches  # where fewer finished, the step is smaller
    losses, skipped, reduces_each = list[float](), 0, each_micro_batch(critic)
    device = next(critic.parameters()).device
    for part, total in list(zip(parts, totals, strict=True)) * update.epochs:
        if not total:
            continue
        batches = make_value_batches(finished, part.tolist(), update.micro_batch_tokens, shares_prompts=shares_prompts)
        found = list[Tensor]()
        for i, batch in enumerate(batches):
            if isinstance(critic, FSDPModule):
                critic.set_requires_gradient_sync(reduces_each or i == len(batches) - 1)
            loss = _value_loss(critic, _with_targets(batch, finished).to(device), max(nominal, total))
            (loss * num_ranks).backward()
            found.append(loss.detach())
        count, norm = step_or_skip(
            critic, optimizer, count, update, learning_rate=settings.learning_rate, name="value model"
        )
        if norm is None:
            skipped += 1
        else:
            losses.append(sum(torch.stack(found).tolist()))
    return float(sum_over_ranks(torch.tensor(losses)).mean()) if losses else 0.0, count, skipped


def _with_targets(batch: TokenBatch, finished: Sequence[Response]) -> TokenBatch:
    picked = [finished[s] for s in batch.samples_B.tolist()]
    old_values = [torch.from_numpy(response.values_r) for response in picked]
    return replace(batch, old_values_X=torch.cat([torch.zeros(0), *old_values]), returns_X=returns_of(picked))


def _value_loss(critic: nn.Module, batch: TokenBatch, responses: int) -> Float[Tensor, ""]:
    """Return a micro-batch's part of the loss of a mini-batch with so many responses; collective.

    batch   on the device, with targets
    """
    values_T = token_values(critic, batch.tokens_1T, batch.position_1T)
    if not batch.num_responses:
        return values_T.sum() * 0.0  # filler
    assert batch.old_values_X is not None, "targets are filled before the loss"
    assert batch.returns_X is not None, "targets are filled before the loss"
    loss_X = clipped_value_loss(
        values_T[batch.row_X], batch.old_values_X, batch.returns_X, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
    )
    tokens_X = response_sizes(batch.response_X, batch.num_responses)
    return (1 / (tokens_X.float() * max(1, responses)) * loss_X).sum()  # mean over responses of their means
