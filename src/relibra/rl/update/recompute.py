"""Recompute: log-probs under the trained weights before the update (old log-probs), where the update needs a pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from relibra.parallel import LiveBalancing
from relibra.replay import RoutingReplay, record_routing
from relibra.replay.device_copies import download, wait_for_copies
from relibra.replay.replay import RouterComparison
from relibra.rl.algorithms.mismatch import MismatchSums, mismatch_sums
from relibra.rl.algorithms.terms import correction_weights
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.token_batch import TokenBatch
from relibra.rl.batch.training_batch import MicroBatchContext, TrainingBatch
from relibra.rl.config.settings import AlgorithmSettings
from relibra.rl.model.token_scores import TokenScores, token_scores


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Sums over tokens of the last windows on this rank, from passes under the weights that sampled them.

    entropy   of the policy
    tokens    their number
    mismatch  trainer compared with sampler
    routers   the trained model's own choices compared with the replayed ones
    """

    entropy: float = 0.0
    tokens: int = 0
    mismatch: MismatchSums = field(default_factory=MismatchSums)
    routers: RouterComparison = field(default_factory=RouterComparison)

    def __add__(self, other: Comparison) -> Comparison:
        """Return the sums over the tokens of both."""
        return Comparison(
            entropy=self.entropy + other.entropy,
            tokens=self.tokens + other.tokens,
            mismatch=self.mismatch + other.mismatch,
            routers=self.routers + other.routers,
        )


class PassScores:
    """Scores of tokens under the weights that sampled, which go to the host while the next micro-batches run.

    found   scores on the host by micro-batch, and the tokens that they are of
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.found: dict[int, tuple[TokenScores, TokenBatch]] = {}
        self._differing: list[Tensor] = []
        self._routers = RouterComparison()

    def add(self, number: int, scores: TokenScores, batch: TokenBatch, replay: RoutingReplay | None) -> None:
        """Keep the scores of a micro-batch's tokens, and what its replay counted; `batch` is on the host."""
        self.found[number] = (_downloaded(scores, batch), batch)
        if replay is not None:
            self._routers += replay.replayed()
            self._differing.append(download(replay.differing()))

    def read(
        self, device: torch.device, batch: TrainingBatch, settings: AlgorithmSettings
    ) -> tuple[Comparison, list[Float[Tensor, " _"] | None]]:
        """Wait for the device once; compare the last windows with the sampler.

        returns   the comparison; the log-probs of the response tokens of each micro-batch of the step, on the host: 0
                  where not scored, None for a micro-batch that was not run
        """
        wait_for_copies(device)
        compared = Comparison(routers=self._routers)
        for counts in self._differing:
            compared += Comparison(routers=RouterComparison(0, 0, 0, *counts.tolist()))
        log_probs: list[Tensor | None] = [None] * len(batch.micro_batches)
        for number, (scores, scored) in self.found.items():
            compared += _compare(scores, scored, settings)
            chosen_X = torch.isin(batch.micro_batches[number].token_X, scored.token_X)
            log_probs[number] = _spread(scores.log_probs_X, chosen_X)
        return compared, log_probs


def _compare(scores: TokenScores, batch: TokenBatch, settings: AlgorithmSettings) -> Comparison:
    """Return the sums over the scored tokens of the last windows of a batch on the host."""
    window, logp_X = batch.of_tokens(batch.in_window_X), scores.log_probs_X[batch.in_window_X]
    sampled_X = window.sampled_log_probs_X
    weight_X = correction_weights(settings, logp_X - sampled_X, window.response_X, window.num_responses)
    return Comparison(
        entropy=float(scores.entropy_X[batch.in_window_X].sum()),
        tokens=len(logp_X),
        mismatch=mismatch_sums(logp_X, sampled_X, weight_X),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Recomputed:
    """Result of the recompute pass on this rank.

    log_probs    of the response tokens of each micro-batch, on the host; 0 before the last windows; None: not run
    compared     trainer with sampler, in the micro-batches that were run
    routes       with `record`: experts that the trained model chose in each micro-batch (R2), else empty
    ran_at_home  micro-batches that did not follow the plan, on all ranks alike
    live         live balancing of the pass; None: there was none
    """

    log_probs: list[Float[Tensor, " _"] | None]
    compared: Comparison = field(default_factory=Comparison)
    routes: Sequence[Integer[Tensor, "_ L K"]] = ()
    ran_at_home: int = 0
    live: LiveBalancing | None = None


def micro_batches_to_recompute(schedule: Schedule, settings: AlgorithmSettings, *, trains: bool) -> list[int]:
    """Return the micro-batches whose old log-probs a pass before the update computes, in their order.

    "recompute": all. "skip_first": none of the first mini-batch, whose old log-probs are the update's own; all with R2,
    for their routes. "sampler": none; after its first mini-batch the update decides whether it needs a pass.

    trains   whether this step trains the policy; if not, only this pass compares it with the sampler
    """
    if settings.old_log_probs == "sampler" and trains:
        return []
    first = int(settings.old_log_probs == "skip_first" and settings.replay != "R2" and trains)
    return np.flatnonzero(schedule.mini_batch_M >= first).tolist()


@torch.no_grad()
def recompute(
    model: nn.Module,
    batch: TrainingBatch,
    context: MicroBatchContext,
    settings: AlgorithmSettings,
    *,
    temperature: float,
    numbers: Sequence[int] | None = None,
    record: bool = False,
) -> Recomputed:
    """Run micro-batches of a step forward, and score the tokens of the last windows; collective.

    The host waits for the device once, at the end.

    numbers  by `micro_batches_to_recompute`; None: all
    record   keep the routes of this pass, to be replayed in the update (R2, arXiv 2507.18071)
    """
    device, scored, routes = model_device(model), PassScores(), list[Tensor]()
    with record_routing(model) if record else nullcontext() as recorder:
        for number in range(len(batch.micro_batches)) if numbers is None else numbers:
            micro_batch = batch.micro_batches[number]
            window = micro_batch.of_tokens(micro_batch.in_window_X)
            with context(number) as replay:
                scores = score_tokens(model, window.to(device), temperature)
            scored.add(number, scores, window, replay)
            if recorder is not None:
                routes += map(download, recorder.take())
    compared, log_probs = scored.read(device, batch, settings)
    return Recomputed(log_probs=log_probs, compared=compared, routes=routes)


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

    Without response tokens, scores of one row that predicts nothing, which keeps collectives aligned.
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
