"""Recompute: what the trained weights say of a step's responses before they change (the old log-probs)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float32
from numpy import ndarray
from torch import Tensor, nn

from relibra.replay import RoutingRecorder, record_routing
from relibra.replay.replay import RouterComparison
from relibra.rl.algorithms.corrections import correction_weights
from relibra.rl.algorithms.mismatch import MismatchSums, mismatch_sums, no_mismatch
from relibra.rl.batch.token_batch import MicroBatch
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.response import Response, with_last_row
from relibra.rl.update.policy_update import Around, log_probs_and_entropy


@dataclass(frozen=True, kw_only=True, eq=False)
class Recomputed:
    """What came of it on this rank.

    log_probs_Sr   of each response token
    responses      those of the batch; with `record`, with the routes that the trained model took here (R2)
    entropy        sum over the tokens of the last windows, and
    tokens         how many they are
    mismatch       trainer beside sampler, on the last windows
    routers        the trained model's own choices beside the replayed ones
    """

    log_probs_Sr: list[Float32[ndarray, " _"]]
    responses: list[Response]
    entropy: float
    tokens: int
    mismatch: MismatchSums
    routers: RouterComparison


@torch.no_grad()
def recompute(
    model: nn.Module, batch: TrainingBatch, around: Around, config: RunConfig, *, record: bool = False
) -> Recomputed:
    """Run a step's micro-batches forward; collective.

    record   keep the routes of this pass, to be replayed in the update (R2, arXiv 2507.18071)
    """
    log_probs_Sr: list[ndarray] = [np.zeros(0, dtype=np.float32) for _ in batch.responses]
    responses, entropy, tokens = list(batch.responses), 0.0, 0
    mismatch, routers = no_mismatch(), RouterComparison()
    fresh_Sr = [_in_last_window(response) for response in batch.responses]
    sampled_Sr = [response.log_probs_r for response in batch.responses]
    with record_routing(model) if record else nullcontext() as recorder:
        for number, micro_batch in enumerate(batch.micro_batches):
            with around(number) as replay:
                logp_X, entropy_X = log_probs_and_entropy(model, micro_batch, config.rollout.temperature)
            if replay is not None:
                routers += replay.comparison()
            if recorder is not None:
                _keep_routes(recorder, micro_batch, responses)
            micro_batch.scatter(logp_X, log_probs_Sr)
            fresh_X, sampled_X = micro_batch.gather(fresh_Sr) > 0, micro_batch.gather(sampled_Sr)
            mismatch += _compare(logp_X[fresh_X], sampled_X[fresh_X], micro_batch.response_X[fresh_X], config)
            entropy += float(entropy_X[fresh_X].sum())
            tokens += int(fresh_X.sum())
    return Recomputed(
        log_probs_Sr=log_probs_Sr,
        responses=responses,
        entropy=entropy,
        tokens=tokens,
        mismatch=mismatch,
        routers=routers,
    )


@torch.no_grad()
def reference_log_probs(model: nn.Module, batch: TrainingBatch, config: RunConfig) -> Sequence[Float32[ndarray, " _"]]:
    """Return the log-probs of each response token under a frozen policy, which routes by itself."""
    log_probs_Sr: list[ndarray] = [np.zeros(0, dtype=np.float32) for _ in batch.responses]
    for micro_batch in batch.micro_batches:
        if micro_batch.num_responses:
            logp_X, _ = log_probs_and_entropy(model, micro_batch, config.rollout.temperature)
            micro_batch.scatter(logp_X, log_probs_Sr)
    return log_probs_Sr


def _compare(logp_Y: Tensor, sampled_Y: Tensor, response_Y: Tensor, config: RunConfig) -> MismatchSums:
    settings = config.algorithm
    weight_Y = correction_weights(
        settings.correction,
        logp_Y - sampled_Y,
        response_Y,
        int(response_Y.max()) + 1 if len(response_Y) else 0,
        low=settings.correction_low,
        high=settings.correction_high,
    )
    return mismatch_sums(logp_Y, sampled_Y, weight_Y)


def _in_last_window(response: Response) -> ndarray:
    return np.arange(response.length) >= response.length - response.window_length


def _keep_routes(recorder: RoutingRecorder, batch: MicroBatch, responses: list[Response]) -> None:
    """Put the routes of a forward pass into the responses it was over."""
    [experts_TLK] = recorder.take()
    if not batch.num_responses:
        return
    rows = [len(responses[s].tokens_n) - 1 for s in batch.samples_B]
    for s, piece in zip(batch.samples_B.tolist(), experts_TLK.cpu().split(rows), strict=True):
        responses[s] = replace(responses[s], experts_nLK=with_last_row(piece.numpy()))
