"""The policy loss of a run: the function that `algorithm.loss` names, its calls, and the check of one of the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from relibra.errors import ConfigError
from relibra.printable import excerpt
from relibra.rl.algorithms.terms import LossInputs, LossResult, LossTotals, token_log_probs
from relibra.rl.batch.token_batch import TokenBatch, make_token_batch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.rollout.response import Window, new_response
from relibra.user_function import import_function, user_errors


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a run.

    function   of `algorithm.loss`; one of the user is called only for mini-batches with tokens to train on
    metrics    names of the sums that it returns
    """

    config: RunConfig
    function: Callable[[LossInputs], LossResult]
    metrics: tuple[str, ...] = ()

    def __call__(
        self, logits_XV: Float[Tensor, "X V"], batch: TokenBatch, totals: LossTotals
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """Return a micro-batch's part of the loss, and sums over its trained tokens: "loss", "tokens" and the metrics.

        logits_XV   that predict the tokens; for filler one row, whose backward pass keeps collectives aligned
        raises      ConfigError for a function of the user that fails, or returns something else than a finite loss
        """
        if not batch.num_responses:
            return logits_XV.sum() * 0.0, {}
        assert batch.loss_mask_X is not None, "loss_mask_X is filled before the update"
        assert batch.old_log_probs_X is not None, "old_log_probs_X is filled before the update"
        assert batch.advantages_X is not None, "advantages_X is filled before the update"
        assert batch.positive_B is not None, "positive_B is filled before the update"
        inputs = LossInputs(
            logits_XV=logits_XV,
            log_probs_X=token_log_probs(logits_XV, batch.target_X, self.config.rollout.temperature),
            old_log_probs_X=batch.old_log_probs_X,
            sampled_log_probs_X=batch.sampled_log_probs_X,
            ref_log_probs_X=batch.ref_log_probs_X,
            advantages_X=batch.advantages_X,
            mask_X=batch.loss_mask_X,
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
        sums = {name: _number(value) for name, value in metrics.items()}
        return loss, {"loss": _number(loss), "tokens": float(batch.loss_mask_X.sum()), **sums}

    def _checked(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Any]]:
        """Return what the user's function returns; ConfigError if it fails, or that is no loss."""
        with user_errors(f"algorithm.loss {inputs.settings.loss!r}", ConfigError):
            found = self.function(inputs)
            if not _is_result(found, self.metrics):
                got, tokens = " ".join(excerpt(found, 200).split()), int(inputs.mask_X.sum())
                raise ConfigError(
                    f"returned {got} for {tokens} trained tokens: allowed is (loss, metrics), a tensor of one finite "
                    "number (divide the sum over tokens by inputs.totals.tokens, not by a count of the micro-batch, "
                    "which may be 0) and a dict of finite numbers, of the same names at every call, not loss or tokens"
                )
        loss, metrics = found
        return loss if loss.requires_grad else loss + inputs.logits_XV.sum() * 0.0, metrics


def _is_result(found: Any, names: Collection[str]) -> bool:
    """Return whether a user's function returned a finite loss and finite metrics, of these names if there are any."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)):
        return False
    loss, metrics = found
    if loss.shape or not loss.is_floating_point() or not isinstance(metrics, Mapping):
        return False
    fit = set(metrics) == set(names or metrics) and not {"loss", "tokens"} & set(metrics)
    return fit and all(math.isfinite(_number(value)) for value in (loss, *metrics.values()))


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
    total, sums = loss(logits_XV, batch, totals)
    total.backward()
    if logits_XV.grad is None or not logits_XV.grad.any():
        raise ConfigError(f"algorithm.loss {name!r} has no gradient: compute it from inputs.log_probs_X")
    loss = replace(loss, metrics=tuple(sums)[2:])
    loss(logits_XV, replace(batch, loss_mask_X=torch.zeros(6, dtype=torch.bool)), totals)
    return loss


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


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
