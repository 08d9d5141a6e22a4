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
from relibra.rl.algorithms.terms import correction_weights, token_entropy, token_log_probs
from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.batch.training_batch import MicroBatchContext, TrainingBatch
from relibra.rl.config.settings import AlgorithmSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class Recomputed:
    """Result of the recompute pass on this rank.

    log_probs    of the response tokens of each micro-batch
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
    """Run a step's micro-batches forward; collective.

    record   keep the routes of this pass, to be replayed in the update (R2, arXiv 2507.18071)
    """
    log_probs, routes, entropy, tokens = list[Tensor](), list[Tensor](), 0.0, 0
    mismatch, routers = MismatchSums(), RouterComparison()
    with record_routing(model) if record else nullcontext() as recorder:
        for number, micro_batch in enumerate(batch.micro_batches):
            with context(number) as replay:
                logp_X, entropy_X = log_probs_and_entropy(model, micro_batch, temperature)
            if replay is not None:
                routers += replay.comparison()
            if recorder is not None:
                routes += [experts_TLK.cpu() for experts_TLK in recorder.take()]
            log_probs.append(logp_X.float())
            window_X = micro_batch.in_window_X
            logp_Y, sampled_Y = logp_X[window_X], micro_batch.sampled_log_probs_X[window_X]  # Y: the window's of X
            response_Y, num_responses = micro_batch.response_X[window_X], micro_batch.num_responses
            weight_Y = correction_weights(settings, logp_Y - sampled_Y, response_Y, num_responses)
            mismatch += mismatch_sums(logp_Y, sampled_Y, weight_Y)
            entropy += float(entropy_X[window_X].sum())
            tokens += int(window_X.sum())
    return Recomputed(
        log_probs=log_probs, routes=routes, entropy=entropy, tokens=tokens, mismatch=mismatch, routers=routers
    )


@torch.no_grad()
def reference_log_probs(model: nn.Module, batch: TrainingBatch, temperature: float) -> list[Float[Tensor, " _"]]:
    """Return the log-probs of the response tokens of each micro-batch under a frozen policy, which routes by itself.

    Collective where the policy is sharded: fillers run too.
    """
    return [log_probs_and_entropy(model, micro_batch, temperature)[0].float() for micro_batch in batch.micro_batches]


def response_logits(model: nn.Module, batch: TokenBatch) -> Float[Tensor, "X V"]:
    """Return the logits that predict each response token; for filler, one row that predicts nothing. Collective."""
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
    model: nn.Module, batch: TokenBatch, temperature: float
) -> tuple[Float[Tensor, " X"], Float[Tensor, " X"]]:
    """Return log-prob and entropy of the policy at each response token, on the CPU; collective."""
    logits_XV = response_logits(model, batch)[: len(batch.row_X)]
    targets_X = batch.target_X.to(logits_XV.device)
    return token_log_probs(logits_XV, targets_X, temperature).cpu(), token_entropy(logits_XV, temperature).cpu()
