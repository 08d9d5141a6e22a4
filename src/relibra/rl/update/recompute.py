"""Recompute: log-probs of a step's responses under the trained weights before the update (old log-probs)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from relibra.parallel import LiveBalancing
from relibra.replay import record_routing
from relibra.replay.replay import RouterComparison
from relibra.rl.algorithms.mismatch import MismatchSums, mismatch_sums
from relibra.rl.algorithms.terms import correction_weights
from relibra.rl.batch.device_copies import download, wait_for_copies
from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.batch.training_batch import MicroBatchContext, TrainingBatch
from relibra.rl.config.settings import AlgorithmSettings
from relibra.rl.model.token_scores import TokenScores, token_scores


@dataclass(frozen=True, kw_only=True, eq=False)
class Recomputed:
    """Result of the recompute pass on this rank.

    log_probs    of the response tokens of each micro-batch, on the host; 0 before the last windows
    routes       with `record`: experts that the trained model chose in each micro-batch (R2), else empty
    entropy      sum over the tokens of the last windows
    tokens       their number
    mismatch     trainer compared with sampler, on the last windows
    routers      the trained model's own choices compared with the replayed ones
    ran_at_home  micro-batches that did not follow the plan, on all ranks alike
    live         live balancing of the pass; None: there was none
    """

    log_probs: list[Float[Tensor, " _"]]
    routes: list[Integer[Tensor, "_ L K"]]
    entropy: float
    tokens: int
    mismatch: MismatchSums
    routers: RouterComparison
    ran_at_home: int = 0
    live: LiveBalancing | None = None


@torch.no_grad()
def recompute(
    model: nn.Module,
    batch: TrainingBatch,
    context: MicroBatchContext,
    settings: AlgorithmSettings,
    *,
    temperature: float,
    record: bool = False,
) -> Recomputed:
    """Run a step's micro-batches forward, and score the tokens of the last windows; collective.

    The host waits for the device once, at the end.

    record   keep the routes of this pass, to be replayed in the update (R2, arXiv 2507.18071)
    """
    device, windows = model_device(model), [one.of_tokens(one.in_window_X) for one in batch.micro_batches]
    found, routes, differing, routers = list[TokenScores](), list[Tensor](), list[Tensor](), RouterComparison()
    with record_routing(model) if record else nullcontext() as recorder:
        for number, window in enumerate(windows):
            with context(number) as replay:
                found.append(_downloaded(score_tokens(model, window.to(device), temperature), window))
            if replay is not None:
                routers += replay.replayed()
                differing.append(download(replay.differing()))
            if recorder is not None:
                routes += map(download, recorder.take())
    wait_for_copies(device)
    for counts in differing:
        routers += RouterComparison(0, 0, 0, *counts.tolist())
    mismatch, entropy = MismatchSums(), 0.0
    for scores, window in zip(found, windows, strict=True):
        logp_X, sampled_X = scores.log_probs_X, window.sampled_log_probs_X
        weight_X = correction_weights(settings, logp_X - sampled_X, window.response_X, window.num_responses)
        mismatch += mismatch_sums(logp_X, sampled_X, weight_X)
        entropy += float(scores.entropy_X.sum())
    return Recomputed(
        log_probs=[
            _spread(scores.log_probs_X, one.in_window_X) for scores, one in zip(found, batch.micro_batches, strict=True)
        ],
        routes=routes,
        entropy=entropy,
        tokens=sum(len(window.row_X) for window in windows),
        mismatch=mismatch,
        routers=routers,
    )


@torch.no_grad()
def reference_log_probs(model: nn.Module, batch: TrainingBatch, temperature: float) -> list[Float[Tensor, " _"]]:
    """Return the log-probs of the trained tokens of each micro-batch under a frozen policy, which routes by itself.

    0 at other response tokens. Collective where the policy is sharded: fillers run too.
    """
    device, found = model_device(model), list[TokenScores]()
    masks = [
        torch.ones_like(one.in_window_X) if one.loss_mask_X is None else one.loss_mask_X for one in batch.micro_batches
    ]
    for micro_batch, mask_X in zip(batch.micro_batches, masks, strict=True):
        trained = micro_batch.of_tokens(mask_X)
        found.append(_downloaded(score_tokens(model, trained.to(device), temperature), trained))
    wait_for_copies(device)
    return [_spread(scores.log_probs_X, mask_X) for scores, mask_X in zip(found, masks, strict=True)]


def score_tokens(model: nn.Module, batch: TokenBatch, temperature: float) -> TokenScores:
    """Return log-prob and entropy of the policy at each response token of a batch on the device; collective.

    Without response tokens, those of one row that predict nothing, which keeps collectives aligned.
    """
    row_X, target_X = batch.row_X, batch.target_X
    if not len(row_X):
        row_X = target_X = torch.zeros(1, dtype=torch.int64, device=row_X.device)
    return token_scores(model, batch.tokens_1T, batch.position_1T, row_X, target_X, temperature)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    return next(model.parameters()).device


def _downloaded(scores: TokenScores, batch: TokenBatch) -> TokenScores:
    """Return the scores of a batch's tokens on the host, complete after `wait_for_copies`; filler has none."""
    tokens = len(batch.row_X)
    return TokenScores(download(scores.log_probs_X[:tokens].float()), download(scores.entropy_X[:tokens].float()))


def _spread(values_Y: Tensor, chosen_X: Tensor) -> Tensor:
    """Return the values of the chosen tokens at their places among all, and 0 elsewhere."""
    spread_X = torch.zeros(len(chosen_X), dtype=values_Y.dtype)
    spread_X[chosen_X] = values_Y
    return spread_X
