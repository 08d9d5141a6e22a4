"""The update: what the policy learns from a step's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.rl.algorithms.corrections import correction_weights
from relibra.rl.algorithms.divergences import kl_estimate
from relibra.rl.algorithms.policy_loss import (
    clipped_surrogate,
    sequence_log_ratio,
    token_entropy,
    token_log_probs,
    token_weights,
)
from relibra.rl.batch.token_batch import MicroBatch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.optimizer import clip_gradients, set_learning_rate

Around = Callable[[int], AbstractContextManager]
"""What a micro-batch's passes run in, by its number: the plan, the replay of routes, or nothing."""


def response_logits(model: nn.Module, batch: MicroBatch) -> Float[Tensor, "X V"]:
    """Return the logits that predict each response token; of filler, one row that predicts nothing. Collective."""
    device = next(model.parameters()).device
    rows = batch.row_X if len(batch.row_X) else torch.zeros(1, dtype=torch.int64)
    return model(
        input_ids=batch.tokens_1T.to(device),
        position_ids=batch.position_1T.to(device),
        use_cache=False,
        logits_to_keep=rows.to(device),
    ).logits[0]


@torch.no_grad()
def log_probs_and_entropy(
    model: nn.Module, batch: MicroBatch, temperature: float
) -> tuple[Float[Tensor, " X"], Float[Tensor, " X"]]:
    """Return the log-probability of each response token and the entropy of what it was drawn from; collective."""
    logits_XV = response_logits(model, batch)[: len(batch.row_X)]
    targets_X = batch.target_X.to(logits_XV.device)
    return token_log_probs(logits_XV, targets_X, temperature).cpu(), token_entropy(logits_XV, temperature).cpu()


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTargets:
    """What the policy learns from this rank's responses: one array over the response tokens of each.

    log_probs_old_Sr   under the trained weights that sampled the last window
    sampled_Sr         under the sampler
    advantage_Sr       0 where not trained
    trained_Sr         tokens that the surrogate sees
    reference_Sr       log-probs of the reference policy; None: there is none
    positive_S         finished responses with a reward above 0
    """

    log_probs_old_Sr: Sequence[Float[ndarray, " _"]]
    sampled_Sr: Sequence[Float[ndarray, " _"]]
    advantage_Sr: Sequence[Float[ndarray, " _"]]
    trained_Sr: Sequence[Bool[ndarray, " _"]]
    reference_Sr: Sequence[Float[ndarray, " _"]] | None
    positive_S: Bool[ndarray, " S"]


@dataclass(frozen=True, kw_only=True)
class MiniBatchTotals:
    """What a mini-batch holds on all ranks together: losses are divided by it, so cutting does not change them.

    tokens            trained tokens
    responses         responses with a trained token
    positive_tokens   response tokens of positive responses
    """

    tokens: int
    responses: int
    positive_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The same of all mini-batches of a step, those without a trained token included."""

    of_mini_batch: Sequence[MiniBatchTotals]

    @property
    def tokens(self) -> int:
        """Trained tokens of the step."""
        return sum(totals.tokens for totals in self.of_mini_batch)

    @property
    def positive_tokens(self) -> int:
        """Response tokens of positive responses."""
        return sum(totals.positive_tokens for totals in self.of_mini_batch)


def own_totals(
    targets: PolicyTargets, mini_batch_S: Int64[ndarray, " S"], num_mini_batches: int
) -> Int64[ndarray, "n 3"]:
    """Count this rank's part of the totals of each mini-batch; the sum over ranks makes `MiniBatchTotals`."""
    counts_n3 = np.zeros((num_mini_batches, 3), dtype=np.int64)
    for s, mini_batch in enumerate(mini_batch_S):
        tokens = int(targets.trained_Sr[s].sum())
        counts_n3[mini_batch] += tokens, tokens > 0, len(targets.trained_Sr[s]) if targets.positive_S[s] else 0
    return counts_n3


@dataclass
class UpdateSums:
    """This rank's sums over trained tokens; they add up over ranks."""

    loss: float = 0.0
    clipped: float = 0.0
    masked: float = 0.0
    tokens: float = 0.0
    kl: float = 0.0


def policy_loss(
    logits_XV: Float[Tensor, "X V"],
    batch: MicroBatch,
    targets: PolicyTargets,
    totals: StepTotals,
    mini_batch: int,
    config: RunConfig,
    sums: UpdateSums,
) -> Float[Tensor, ""]:
    """Return this micro-batch's part of the loss of its mini-batch: those of all ranks add up to it."""
    settings, device = config.algorithm, logits_XV.device
    if not batch.num_responses:
        return logits_XV.sum() * 0.0  # filler: its backward pass is what the peers wait for
    own = totals.of_mini_batch[mini_batch]
    logp_X = token_log_probs(logits_XV, batch.target_X.to(device), config.rollout.temperature)
    response_X = batch.response_X.to(device)
    trained_X = batch.gather(targets.trained_Sr).to(device) > 0

    def of_trained(values_Sr: Sequence[ndarray]) -> Tensor:
        return batch.gather(values_Sr).to(device)[trained_X]

    response_Y, old_Y = response_X[trained_X], of_trained(targets.log_probs_old_Sr)  # Y: the trained ones of X
    correction_Y = correction_weights(
        settings.correction,
        old_Y - of_trained(targets.sampled_Sr),
        response_Y,
        batch.num_responses,
        low=settings.correction_low,
        high=settings.correction_high,
    )
    log_ratio_Y = logp_X[trained_X] - old_Y
    if settings.ratio == "sequence":
        log_ratio_Y = sequence_log_ratio(log_ratio_Y, response_Y, batch.num_responses)
    surrogate_Y, clipped_Y = clipped_surrogate(
        log_ratio_Y,
        of_trained(targets.advantage_Sr),
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    weight_Y = token_weights(
        settings.aggregate,
        torch.bincount(response_Y, minlength=batch.num_responses)[response_Y],
        tokens_of_mini_batch=max(1, own.tokens),
        tokens_of_step=max(1, totals.tokens),
        mini_batches=len(totals.of_mini_batch),
        responses_of_mini_batch=max(1, own.responses),
        max_response=config.rollout.max_response,
    )
    gain_Y = correction_Y * surrogate_Y
    if targets.reference_Sr is not None:
        kl_Y = kl_estimate(settings.kl_estimator, logp_X[trained_X], of_trained(targets.reference_Sr))
        gain_Y = gain_Y - settings.kl_coefficient * kl_Y
        sums.kl += float(kl_Y.detach().sum())
    if settings.entropy_coefficient:
        entropy_Y = token_entropy(logits_XV[trained_X], config.rollout.temperature)
        gain_Y = gain_Y + settings.entropy_coefficient * entropy_Y
    loss = -(weight_Y * gain_Y).sum()
    if settings.positive_coefficient and totals.positive_tokens:
        positive_X = torch.from_numpy(targets.positive_S[batch.samples_B]).to(device)[response_X]
        share = len(totals.of_mini_batch) / totals.positive_tokens
        loss = loss - settings.positive_coefficient * share * (logp_X * positive_X).sum()
    sums.loss += float(loss.detach())
    sums.clipped += float(clipped_Y.sum())
    sums.masked += float((correction_Y == 0).sum())
    sums.tokens += len(response_Y)
    return loss


def update_policy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[int, MicroBatch]],
    targets: PolicyTargets,
    totals: StepTotals,
    mini_batch: int,
    config: RunConfig,
    *,
    around: Around,
    optimizer_step: int,
    num_ranks: int,
    sums: UpdateSums,
) -> float:
    """Make one optimizer step on a mini-batch and return the gradient norm; collective.

    FSDP averages gradients over ranks, so each rank's sum is scaled back up by their number.

    batches          (number in the step, micro-batch) of this rank
    optimizer_step   steps made before, for the warm-up of the learning rate
    """
    for i, (number, batch) in enumerate(batches):
        if isinstance(model, FSDPModule):  # gradients are reduced once, after the last micro-batch
            model.set_requires_gradient_sync(i == len(batches) - 1)
        with around(number):
            loss = policy_loss(response_logits(model, batch), batch, targets, totals, mini_batch, config, sums)
            (loss * num_ranks).backward()
    grad_norm = clip_gradients(
        model.parameters(),
        config.update.max_grad_norm,
        what=f"the policy's gradient in optimizer step {optimizer_step}",
    )
    set_learning_rate(optimizer, config.update.learning_rate, optimizer_step, config.update.warmup_steps)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm
