"""The value model's part of a step: what it expects of each token, and what it learns from finished responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy import ndarray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.rl.algorithms.value_loss import clipped_value_loss, value_weights
from relibra.rl.batch.schedule import own_micro_batches
from relibra.rl.batch.step_plan import own_mini_batches
from relibra.rl.batch.token_batch import MicroBatch, make_micro_batch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.critic import values
from relibra.rl.model.optimizer import clip_gradients, set_learning_rate
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import largest_over_ranks, sum_over_ranks


def expect(critic: nn.Module, responses: Sequence[Response], config: RunConfig) -> list[Float32[ndarray, " _"]]:
    """Return what the value model says before each response token and after the last: r + 1 numbers; collective."""
    expected: list[Float32[ndarray, " _"]] = [np.zeros(0, dtype=np.float32) for _ in responses]
    for batch in _cut(responses, range(len(responses)), config):
        with torch.no_grad():
            values_T = values(critic, batch.tokens_1T, batch.position_1T).cpu()
        before_Sr = list(expected)
        batch.scatter(values_T[batch.row_X], before_Sr)
        for s, after in zip(batch.samples_B.tolist(), values_T[batch.after_B].numpy(), strict=True):
            expected[s] = np.append(before_Sr[s], after).astype(np.float32)
    return expected


def update_values(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    finished: Sequence[Response],
    config: RunConfig,
    *,
    optimizer_step: int,
    num_ranks: int,
) -> tuple[float, int]:
    """Train the value model on finished responses, all their windows; collective.

    The target of every token is the reward at the end, discounted (Monte Carlo, lambda 1). Mini-batches are dealt by
    lot, like those of the policy: by number, the longest responses would always be in the first.

    finished         of this rank, with reward and recorded values
    optimizer_step   steps made before, for the warm-up of the learning rate
    returns          mean loss over mini-batches on all ranks, and the optimizer steps that were made
    """
    parts = own_mini_batches(finished, config)
    totals = sum_over_ranks(torch.tensor([len(part) for part in parts])).tolist()
    old_Sr = [response.values_r for response in finished]
    returns_Sr = [discounted_returns(response, config.algorithm.gamma) for response in finished]
    nominal = config.rollout.responses_per_step // config.update.mini_batches  # fewer that finished make a smaller step
    losses: list[float] = []
    for part, total in list(zip(parts, totals, strict=True)) * config.update.epochs:
        if not total:
            continue  # nobody can fill it
        batches = _cut(finished, part.tolist(), config)
        loss_sum = 0.0
        for i, batch in enumerate(batches):
            if isinstance(critic, FSDPModule):
                critic.set_requires_gradient_sync(i == len(batches) - 1)
            loss = _loss(critic, batch, old_Sr, returns_Sr, config, nominal=max(nominal, total))
            (loss * num_ranks).backward()
            loss_sum += float(loss.detach())
        step = optimizer_step + len(losses)
        what = f"the value model's gradient in optimizer step {step}"
        clip_gradients(critic.parameters(), config.update.max_grad_norm, what=what)
        set_learning_rate(optimizer, config.critic.learning_rate, step, config.update.warmup_steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum)
    if not losses:
        return 0.0, 0
    return float(sum_over_ranks(torch.tensor(losses)).mean()), len(losses)


def _loss(
    critic: nn.Module,
    batch: MicroBatch,
    old_Sr: Sequence[Float[ndarray, " _"]],
    returns_Sr: Sequence[Float[ndarray, " _"]],
    config: RunConfig,
    *,
    nominal: int,
) -> Float[Tensor, ""]:
    values_T = values(critic, batch.tokens_1T, batch.position_1T)
    if not batch.num_responses:
        return values_T.sum() * 0.0
    device = values_T.device
    loss_X = clipped_value_loss(
        values_T[batch.row_X.to(device)],
        batch.gather(old_Sr).to(device),
        batch.gather(returns_Sr).to(device),
        clip_low=config.critic.clip_low,
        clip_high=config.critic.clip_high,
    )
    tokens_X = torch.bincount(batch.response_X, minlength=batch.num_responses)[batch.response_X]
    return (value_weights(tokens_X.to(device), nominal) * loss_X).sum()


def discounted_returns(response: Response, gamma: float) -> Float[ndarray, " r"]:
    """Return what a value model should say before each token of a finished response: the reward to come."""
    assert response.reward is not None, f"sample {response.sample_id} is finished, so it has a reward"
    return response.reward * gamma ** np.arange(response.length - 1, -1, -1.0)


def _cut(responses: Sequence[Response], chosen: Sequence[int], config: RunConfig) -> list[MicroBatch]:
    """Cut this rank's responses into micro-batches, as many as every other rank has; collective."""
    runs = own_micro_batches([len(responses[s].tokens_n) for s in chosen], config.update.micro_batch_tokens)
    count = largest_over_ranks(len(runs))
    batches = [make_micro_batch(responses, [chosen[i] for i in run], None, whole=True) for run in runs]
    return batches + [make_micro_batch(responses, [], None) for _ in range(count - len(runs))]
