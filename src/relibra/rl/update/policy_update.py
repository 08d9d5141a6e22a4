"""The policy update: one optimizer step per mini-batch and epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.parallel import LiveBalancing
from relibra.parallel.homes.logical_order import reshard
from relibra.rl.algorithms.loss import PolicyLoss
from relibra.rl.algorithms.terms import LossTotals
from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.batch.training_batch import MicroBatchContext, TrainingBatch
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.optimizer import StepCount, step_or_skip
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.update.gradient_reduction import each_micro_batch
from relibra.rl.update.recompute import Comparison, PassScores, model_device, recompute, score_tokens

BeforeFirstStep = Callable[[PassScores | None, TrainingBatch, Comparison], bool]
"""Called before the first optimizer step with the first mini-batch's scores (None: a pass computed old log-probs), the
batch, and `PolicyUpdate.compared`. Returns whether the sampler computes what the trainer does, on all ranks alike;
collective."""


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """Result of a policy update on this rank.

    sums         over the trained tokens of this rank, by name (`PolicyLoss`); "at_ratio_1": tokens that no clip can
                 change, because the old log-probs were the update's own
    compared     trainer with sampler, in all micro-batches whose old log-probs this update computed
    grad_norms   of each optimizer step, the same on all ranks
    count        optimizer steps of the policy after it
    skipped      mini-batches whose gradient was not finite; they are in no sum
    ran_at_home  micro-batches that did not follow the plan, on all ranks alike
    live         live balancing of the update; None: there was none
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    compared: Comparison = field(default_factory=Comparison)
    grad_norms: Sequence[float] = ()
    count: StepCount = field(default_factory=StepCount)
    skipped: int = 0
    ran_at_home: int = 0
    live: LiveBalancing | None = None


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
    before_first_step: BeforeFirstStep | None = None,
) -> PolicyUpdate:
    """Train the policy on a step, a mini-batch at a time; collective.

    Gradients are accumulated over the micro-batches of a mini-batch. FSDP averages them over ranks, once or in each
    micro-batch (`gradient_reduction.py`), so each rank's sum is multiplied by the number of ranks. A mini-batch that
    trains no token on any rank is left out; one whose gradient is not finite is skipped (`step_or_skip`).

    Where no pass has computed old log-probs, the first mini-batch takes those of its first forward pass, detached. The
    others take the sampler's; if `before_first_step` returns False, a pass computes theirs. Later epochs reuse them.

    count    optimizer steps made before
    """
    device, temperature = model_device(model), loss.config.rollout.temperature
    all_totals, reduces_each = loss_totals(batch), each_micro_batch(model)
    sums, norms, skipped = defaultdict[str, float](float), list[float](), 0
    compared, is_first = Comparison(), True
    for mini_batch, totals in list(enumerate(all_totals)) * update.epochs:
        if not totals.tokens and (not totals.positive_tokens or ":" in loss.config.algorithm.loss):
            continue
        numbered, found = batch.of_mini_batch(mini_batch), list[Mapping[str, Tensor | float]]()
        old_scores = PassScores() if any(one.old_log_probs_X is None for _, one in numbered) else None
        for i, (number, micro_batch) in enumerate(numbered):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(reduces_each or i == len(numbered) - 1)
            read = loss.of_tokens_read(micro_batch)
            there = read.to(device)
            with context(number) as replay:
                scores = score_tokens(model, there, temperature)
                total, own_sums = loss(scores, there, totals)
                (total * num_ranks).backward()
            found.append(own_sums)
            if old_scores is not None:
                old_scores.add(number, scores, read, replay)
        added = loss.add_up(found)
        if old_scores is not None:
            compared, log_probs = old_scores.read(device, batch, loss.config.algorithm)
            batch = _with_old_log_probs(batch, log_probs)
            added["at_ratio_1"] = added.get("tokens", 0.0)
        if is_first and (before_first_step is None or before_first_step(old_scores, batch, compared)):
            batch = _with_old_log_probs(batch, [one.sampled_log_probs_X for one in batch.micro_batches])
        elif is_first:
            missing = [m for m, one in enumerate(batch.micro_batches) if one.old_log_probs_X is None]
            passed = recompute(model, batch, context, loss.config.algorithm, temperature=temperature, numbers=missing)
            reshard(model)  # the optimizer steps on shards
            batch, compared = _with_old_log_probs(batch, passed.log_probs), compared + passed.compared
        is_first = False
        count, norm = step_or_skip(model, optimizer, count, update, learning_rate=update.learning_rate, name="policy")
        if norm is None:
            skipped += 1
            continue
        for name, value in added.items():
            sums[name] += value
        norms.append(norm)
    return PolicyUpdate(sums=sums, compared=compared, grad_norms=norms, count=count, skipped=skipped)


def _with_old_log_probs(batch: TrainingBatch, log_probs: Sequence[Tensor | None]) -> TrainingBatch:
    """Return the batch with these old log-probs in the micro-batches that have none yet."""
    kept = [one.old_log_probs_X for one in batch.micro_batches]
    return batch.filled(old_log_probs_X=[new if old is None else old for old, new in zip(kept, log_probs, strict=True)])


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
