"""Calls the policy loss, the function that `algorithm.loss` names, and checks a function of the user.

Formulas are in `ppo.py` and the files of its variations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Real
from typing import Any, NoReturn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from relibra.errors import ConfigError
from relibra.printable import excerpt
from relibra.rl.algorithms.terms import LossInputs, LossResult, LossTotals
from relibra.rl.batch.token_batch import TokenBatch, make_token_batch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.token_scores import TokenScores, score_logits
from relibra.rl.rollout.response import Window, new_response
from relibra.user_function import import_function, user_errors


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a run.

    function   of `algorithm.loss`; a user's is not called for mini-batches without trained tokens
    metrics    names of the sums that it returns
    """

    config: RunConfig
    function: Callable[[LossInputs], LossResult]
    metrics: tuple[str, ...] = ()

    def of_tokens_read(self, batch: TokenBatch) -> TokenBatch:
        """Return a batch on the host with only the response tokens that the loss reads (`LossInputs`)."""
        if not batch.num_responses:
            return batch
        assert batch.loss_mask_X is not None, "loss_mask_X is filled before the update"
        assert batch.positive_B is not None, "positive_B is filled before the update"
        read_X, name = batch.loss_mask_X, self.config.algorithm.loss
        if name == "tppo" or ":" in name:
            read_X = read_X | batch.positive_B[batch.response_X]
        batch = batch.of_tokens(read_X)
        return replace(batch, trained_Y=batch.loss_mask_X.nonzero().flatten())  # type: ignore[union-attr]

    def __call__(
        self, scores: TokenScores, batch: TokenBatch, totals: LossTotals
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor | float]]:
        """Return a micro-batch's part of the loss, and sums over its trained tokens: "loss", "tokens" and the metrics.

        The sums are on the device, for `add_up`.

        scores      of the tokens; without any, of one row, whose backward pass keeps collectives aligned
        batch       by `of_tokens_read`, on the device
        raises      ConfigError for a function of the user that fails, or returns something else than a loss
        """
        if not len(batch.row_X):
            return scores.log_probs_X.sum() * 0.0, {}
        assert batch.loss_mask_X is not None, "loss_mask_X is filled before the update"
        assert batch.trained_Y is not None, "trained_Y is filled by `of_tokens_read`"
        assert batch.advantages_X is not None, "advantages_X is filled before the update"
        assert batch.positive_B is not None, "positive_B is filled before the update"
        old_X = batch.old_log_probs_X
        if old_X is None:  # no optimizer step comes before: the log-probs are the old ones
            old_X = torch.where(batch.loss_mask_X, scores.log_probs_X.detach(), 0.0)
        inputs = LossInputs(
            log_probs_X=scores.log_probs_X,
            entropy_X=scores.entropy_X,
            old_log_probs_X=old_X,
            sampled_log_probs_X=batch.sampled_log_probs_X,
            ref_log_probs_X=batch.ref_log_probs_X,
            advantages_X=batch.advantages_X,
            mask_X=batch.loss_mask_X,
            trained_Y=batch.trained_Y,
            versions_X=batch.versions_X,
            response_X=batch.response_X,
            positive_X=batch.positive_B[batch.response_X],
            num_responses=batch.num_responses,
            totals=totals,
            settings=self.config.algorithm,
            temperature=self.config.rollout.temperature,
            max_response=self.config.rollout.max_response,
        )
        loss, metrics = self._checked(inputs) if ":" in inputs.settings.loss else self.function(inputs)
        sums = {"loss": loss, "tokens": len(batch.trained_Y), **metrics}
        return loss, {
            name: value.detach() if isinstance(value, Tensor) else float(value) for name, value in sums.items()
        }

    def add_up(self, found: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
        """Return the sums of a mini-batch from those of its micro-batches; the host waits for the device once.

        raises   ConfigError where a function of the user returned a number that is not finite
        """
        sums = defaultdict[str, float](float)
        for numbers in read_numbers(found):
            if ":" in self.config.algorithm.loss and not all(map(math.isfinite, numbers.values())):
                metrics = {name: number for name, number in numbers.items() if name not in ("loss", "tokens")}
                self._refuse((numbers["loss"], metrics), int(numbers["tokens"]))
            for name, number in numbers.items():
                sums[name] += number
        return dict(sums)

    def _checked(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Any]]:
        """Return what the user's function returns; ConfigError if it fails or returns no loss."""
        with user_errors(f"algorithm.loss {inputs.settings.loss!r}", ConfigError):
            found = self.function(inputs)
            fits = _is_result(found, self.metrics)
        if not fits:
            self._refuse(found, len(inputs.trained_Y))
        loss, metrics = found
        return loss if loss.requires_grad else loss + inputs.log_probs_X.sum() * 0.0, metrics

    def _refuse(self, returned: object, tokens: int) -> NoReturn:
        got = " ".join(excerpt(returned, 200).split())
        raise ConfigError(
            f"algorithm.loss {self.config.algorithm.loss!r} returned {got} for {tokens} trained tokens: allowed is "
            "(loss, metrics), a tensor of one finite number (divide the sum over tokens by inputs.totals.tokens, not "
            "by a count of the micro-batch, which may be 0) and a dict of finite numbers, of the same names at every "
            "call, not loss or tokens"
        )


def _is_result(found: Any, names: Collection[str]) -> bool:
    """Return whether a user's function returned a loss and metrics, of these names if there are any.

    No value is read, which would wait for the device.
    """
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
        return False
    loss, metrics = found
    if loss.shape or not loss.is_floating_point() or not isinstance(metrics, Mapping):
        return False
    fit = set(metrics) == set(names or metrics) and not {"loss", "tokens"} & set(metrics)
    return fit and all(
        value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real) for value in metrics.values()
    )


def read_numbers(found: Sequence[Mapping[str, Tensor | float]]) -> list[dict[str, float]]:
    """Return mappings with one-number tensors as floats, read together: the host waits for the device once."""
    tensors = [value.double().flatten() for one in found for value in one.values() if isinstance(value, Tensor)]
    read = iter(torch.cat([one.to(tensors[0].device) for one in tensors]).tolist() if tensors else ())
    return [
        {name: next(read) if isinstance(value, Tensor) else float(value) for name, value in one.items()}
        for one in found
    ]


def find_loss(config: RunConfig) -> PolicyLoss:
    """Return the loss that `algorithm.loss` names, after calls with made-up inputs.

    raises   ConfigError if there is no such function, or it fails, or returns something else than a finite loss
    """
    name = config.algorithm.loss
    if ":" in name:
        function = import_function("algorithm.loss", name, arguments=("inputs",))
    else:
        function = import_module(f"relibra.rl.algorithms.{name}").loss
    loss, batch = PolicyLoss(config, function), _made_up_batch(with_reference=config.algorithm.kl_coefficient > 0)
    totals = LossTotals(tokens=5, responses=2, positive_tokens=3, step_tokens=9, step_positive_tokens=6, mini_batches=2)
    logits_XV = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    total, sums = _try(loss, logits_XV, batch, totals)
    total.backward()
    if logits_XV.grad is None or not logits_XV.grad.any():
        raise ConfigError(f"algorithm.loss {name!r} has no gradient: compute it from inputs.log_probs_X")
    loss = replace(loss, metrics=tuple(sums)[2:])  # after "loss" and "tokens"
    _try(loss, logits_XV, replace(batch, loss_mask_X=torch.zeros(6, dtype=torch.bool)), totals)
    return loss


def _try(loss: PolicyLoss, logits_XV: Tensor, batch: TokenBatch, totals: LossTotals) -> tuple[Tensor, dict[str, float]]:
    """Return what a loss makes of a batch, whose tokens have these logits."""
    read = loss.of_tokens_read(batch)
    total, sums = loss(score_logits(logits_XV[: len(read.row_X)], read.target_X, 1.0), read, totals)
    return total, loss.add_up([sums])


def _made_up_batch(*, with_reference: bool) -> TokenBatch:
    """Return two responses of three tokens, of which five train."""
    window = Window(tokens_w=np.arange(3), log_probs_w=np.full(3, -2.0, np.float32), experts_mLK=None, stopped=True)
    responses = [new_response(s, s, [0]).extended(window, weight_version=0, max_response=3) for s in range(2)]
    batch = make_token_batch(responses, [0, 1])
    return replace(
        batch,
        old_log_probs_X=batch.sampled_log_probs_X,
        ref_log_probs_X=batch.sampled_log_probs_X if with_reference else None,
        loss_mask_X=torch.tensor([True, True, False, True, True, True]),
        advantages_X=torch.tensor([1.0, 1.0, 0.0, -1.0, -1.0, -1.0]),
        positive_B=torch.tensor([True, False]),
    )
