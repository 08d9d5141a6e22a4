"""Micro-batches: responses, right-padded, cut by a token budget, with the routes that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from relibra.replay import BatchRoutes
from relibra.rl.rollout.sample import RolloutSample
from relibra.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Right-padded responses that go through the model together.

    samples_B       positions of the responses among the rank's samples; -1: filler, of a rank with nothing to do
    response_BN     True on response tokens: those that are trained
    sampled_BN      log-probs under the sampler on response tokens, 0 elsewhere
    routes          rollout routes of these rows; None: route natively
    """

    samples_B: Int[ndarray, " B"]
    tokens_BN: Int[Tensor, "B N"]
    attention_BN: Int[Tensor, "B N"]
    response_BN: Bool[Tensor, "B N"]
    sampled_BN: Float[Tensor, "B N"]
    advantage_B: Float[Tensor, " B"]
    routes: BatchRoutes | None


def assign_micro_batches(lengths_S: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut samples, in order, into runs whose padded size (longest x count) stays within `max_tokens`.

    A sample longer than `max_tokens` goes alone.

    >>> assign_micro_batches([3, 4, 2, 9], 8)
    [[0, 1], [2], [3]]
    """
    batches: list[list[int]] = []
    longest = 0
    for sample, length in enumerate(lengths_S):
        longest = max(longest, length)
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = length
        batches[-1].append(sample)
    return batches


def make_micro_batch(
    samples: Sequence[RolloutSample],
    advantages_S: Float[Tensor, " S"],
    chosen: Sequence[int],
    trace: RoutingTrace | None,
    pad_id: int,
) -> MicroBatch:
    """Lay out the chosen samples.

    trace    routes of all `samples`, in their order; None: route natively
    raises   TraceError when routes and tokens disagree
    """
    width = max(len(samples[s].tokens_n) for s in chosen)
    shape = (len(chosen), width)
    tokens_BN = torch.full(shape, pad_id)
    attention_BN = torch.zeros(shape, dtype=torch.int64)
    response_BN = torch.zeros(shape, dtype=torch.bool)
    sampled_BN = torch.zeros(shape)
    for b, sample in enumerate(samples[s] for s in chosen):
        length = len(sample.tokens_n)
        tokens_BN[b, :length] = torch.from_numpy(sample.tokens_n)
        attention_BN[b, :length] = 1
        response_BN[b, sample.prompt_length : length] = True
        sampled_BN[b, sample.prompt_length : length] = torch.from_numpy(sample.log_probs_r)
    routes = None if trace is None else BatchRoutes.padded(trace.select(chosen), attention_BN, tokens_BN)
    return MicroBatch(
        samples_B=np.asarray(chosen),
        tokens_BN=tokens_BN,
        attention_BN=attention_BN,
        response_BN=response_BN,
        sampled_BN=sampled_BN,
        advantage_B=advantages_S[torch.as_tensor(chosen)],
        routes=routes,
    )


def filler_micro_batch(pad_id: int) -> MicroBatch:
    """Return a micro-batch that trains nothing, for a rank that must keep its peers company in their collectives."""
    return MicroBatch(
        samples_B=np.full(1, -1),
        tokens_BN=torch.full((1, 2), pad_id),
        attention_BN=torch.ones(1, 2, dtype=torch.int64),
        response_BN=torch.zeros(1, 2, dtype=torch.bool),
        sampled_BN=torch.zeros(1, 2),
        advantage_B=torch.zeros(1),
        routes=None,
    )
