"""Recompute and update: the two passes of the trained model over a step's micro-batches, on recorded routes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relibra.replay import replay_routing
from relibra.rl.batch import MicroBatch
from relibra.rl.config import UpdateSettings
from relibra.rl.losses import clipped_policy_loss, token_log_probs
from relibra.rl.policy import clip_gradients


@dataclass(frozen=True)
class Recomputed:
    """Log-probs of a micro-batch under the trained model at the weights that sampled it, and how routes compared.

    disagreement   share of (token, layer) where the trained router would have picked another set; None: no replay
    """

    log_probs_BN: Float[Tensor, "B N"]
    disagreement: float | None


def recompute_log_probs(
    model: nn.Module, micro_batch: MicroBatch, temperature: float, *, weight_version: int
) -> Recomputed:
    """Run one micro-batch forward without gradients; collective over the ranks.

    weight_version   of the model; routes recorded under another one are refused (TraceError)
    """
    routes = micro_batch.routes
    replaying = nullcontext() if routes is None else replay_routing(model, routes, weight_version=weight_version)
    with torch.no_grad(), replaying as replay:
        log_probs_BN = _log_probs(model, micro_batch, temperature)
    return Recomputed(log_probs_BN, None if replay is None else replay.disagreement)


def update_policy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    old_log_probs: Sequence[Float[Tensor, "_ _"]],
    *,
    settings: UpdateSettings,
    temperature: float,
    tokens_of_all_ranks: int,
    num_ranks: int,
) -> tuple[float, float]:
    """Make one optimizer step on a mini-batch and return (this rank's part of the loss, gradient norm); collective.

    The loss is the mean over the response tokens of the mini-batch on all ranks, however it is cut into micro-batches.
    FSDP averages gradients over ranks, so each rank's sum is scaled back up by their number.

    old_log_probs         per micro-batch `[B, N]`, from `recompute_log_probs`
    tokens_of_all_ranks   response tokens of the mini-batch, all ranks together
    """
    loss_sum = 0.0
    for i, (micro_batch, old_BN) in enumerate(zip(micro_batches, old_log_probs, strict=True)):
        if isinstance(model, FSDPModule):  # gradients are reduced once, after the last micro-batch
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
        routes = micro_batch.routes
        with replay_routing(model, routes) if routes is not None else nullcontext():
            loss = clipped_policy_loss(
                _log_probs(model, micro_batch, temperature),
                old_BN,
                micro_batch.advantage_B.to(old_BN.device),
                micro_batch.response_BN.to(old_BN.device),
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
            )
            (loss * num_ranks / max(1, tokens_of_all_ranks)).backward()
        loss_sum += float(loss.detach())
    grad_norm = clip_gradients(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_sum / max(1, tokens_of_all_ranks), grad_norm


def _log_probs(model: nn.Module, micro_batch: MicroBatch, temperature: float) -> Float[Tensor, "B N"]:
    device = next(model.parameters()).device
    tokens_BN = micro_batch.tokens_BN.to(device)
    logits_BNV = model(input_ids=tokens_BN, attention_mask=micro_batch.attention_BN.to(device), use_cache=False).logits
    return token_log_probs(logits_BNV, tokens_BN, temperature)
