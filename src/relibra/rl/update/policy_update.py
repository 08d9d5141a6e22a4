"""The policy update: one optimizer step per mini-batch and epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.rl.algorithms.loss import PolicyLoss
from relibra.rl.algorithms.terms import LossTotals
from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.batch.training_batch import MicroBatchContext, TrainingBatch
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.optimizer import StepCount, step_or_skip
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.update.gradient_reduction import each_micro_batch
from relibra.rl.update.recompute import model_device, score_tokens


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """Result of a policy update on this rank.

    sums         over the trained tokens of this rank, by name (`PolicyLoss`)
    grad_norms   of each optimizer step, the same on all ranks
    count        optimizer steps of the policy after it
    skipped      mini-batches whose gradient was not finite; they are in no sum
    ran_at_home  micro-batches that did not follow the plan, on all ranks alike
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    grad_norms: Sequence[float] = ()
    count: StepCount = field(default_factory=StepCount)
    skipped: int = 0
    ran_at_home: int = 0


def update_policy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch,
    context: MicroBatchContext,
    loss: PolicyLoss,
    update: UpdateSettings,
    *,
    count: StepCount,
    num_ranks: int,
) -> PolicyUpdate:
    """Train the policy on a step, a mini-batch at a time; collective.

    Gradients are accumulated over the micro-batches of a mini-batch, and averaged over ranks by FSDP, once or in each
    of them (`gradient_reduction.py`), so each rank's sum is multiplied by the number of ranks. A mini-batch that trains
    no token on any rank is left out; one whose gradient is not finite is skipped (`step_or_skip`).

    count    optimizer steps made before
    """
    device, temperature = model_device(model), loss.config.rollout.temperature
    all_totals, reduces_each = loss_totals(batch), each_micro_batch(model)
    sums, norms, skipped = defaultdict[str, float](float), list[float](), 0
    for mini_batch, totals in list(enumerate(all_totals)) * update.epochs:
        if not totals.tokens and (not totals.positive_tokens or ":" in loss.config.algorithm.loss):
            continue
        numbered, found = batch.of_mini_batch(mini_batch), list[Mapping[str, Tensor | float]]()
        for i, (number, micro_batch) in enumerate(numbered):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(reduces_each or i == len(numbered) - 1)
            read = loss.of_tokens_read(micro_batch).to(device)
            with context(number):
                total, own_sums = loss(score_tokens(model, read, temperature), read, totals)
                (total * num_ranks).backward()
            found.append(own_sums)
        added = loss.add_up(found)
        count, norm = step_or_skip(model, optimizer, count, update, learning_rate=update.learning_rate, name="policy")
        if norm is None:
            skipped += 1
            continue
        for name, value in added.items():
            sums[name] += value
        norms.append(norm)
    return PolicyUpdate(sums=sums, grad_norms=norms, count=count, skipped=skipped)


def loss_totals(batch: TrainingBatch) -> list[LossTotals]:
    """Return the totals of each mini-batch of a step over all ranks; collective."""
    mini_batch_M = batch.schedule.mini_batch_M.tolist()
    counts_n3 = torch.zeros(max(mini_batch_M, default=-1) + 1, 3, dtype=torch.int64)
    for mini_batch, micro_batch in zip(mini_batch_M, batch.micro_batches, strict=True):
        counts_n3[mini_batch] += _count_trained(micro_batch)
    counts_n3 = sum_over_ranks(counts_n3)
    _, _, step_positive = counts_n3.sum(0).tolist()
    step_tokens = int(counts_n3[:, 0].sum())
    return [
        LossTotals(
            tokens=tokens,
            responses=responses,
            positive_tokens=positive,
            step_tokens=step_tokens,
            step_positive_tokens=step_positive,
            mini_batches=len(counts_n3),
        )
        for tokens, responses, positive in counts_n3.tolist()
    ]


def _count_trained(batch: TokenBatch) -> torch.Tensor:
    """Return trained tokens, responses that have some, and response tokens of positive responses."""
    assert batch.loss_mask_X is not None, "credit is assigned before the update"
    assert batch.positive_B is not None, "credit is assigned before the update"
    trained_B = torch.bincount(batch.response_X[batch.loss_mask_X], minlength=batch.num_responses)
    return torch.stack([trained_B.sum(), (trained_B > 0).sum(), batch.positive_B[batch.response_X].sum()])
