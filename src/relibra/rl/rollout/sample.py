"""`RolloutSample`: one response, with all that training needs to know of how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from numpy import ndarray

from relibra.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutSample:
    """A prompt with one response.

    tokens_n         prompt, then response
    prompt_length    tokens of the prompt
    log_probs_r      of each response token under the policy that sampled it
    experts_nLK      logical ids; row t = routing while processing token t; the last row was never computed
    finish_reason    `stop`: ended itself; `length`: cut at the longest response allowed
    """

    sample_id: int
    group_id: int
    tokens_n: Int64[ndarray, " n"]
    prompt_length: int
    log_probs_r: Float32[ndarray, " r"]
    experts_nLK: Shaped[ndarray, "n L K"]
    weight_version: int
    finish_reason: Literal["stop", "length"]


@runtime_checkable
class RolloutEngine(Protocol):
    """What the trainer asks of any engine, embedded or served."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sample_ids: Sequence[int],
        group_ids: Sequence[int],
        generator: torch.Generator,
    ) -> list[RolloutSample]:
        """Sample one response per prompt."""
        ...


def trace_of(
    samples: Sequence[RolloutSample], *, num_experts: int, layer_ids: Sequence[int], source: str
) -> RoutingTrace:
    """Gather the routes of samples; the last row of each is marked invalid.

    raises    TraceError when an engine delivered illegal routes
    """
    return RoutingTrace.from_samples(
        [sample.experts_nLK for sample in samples],
        num_experts=num_experts,
        layer_ids=layer_ids,
        valid=[_all_but_last(len(sample.tokens_n)) for sample in samples],
        tokens=[sample.tokens_n for sample in samples],
        sample_ids=[sample.sample_id for sample in samples],
        group_ids=[sample.group_id for sample in samples],
        prompt_lengths=[sample.prompt_length for sample in samples],
        weight_versions=[sample.weight_version for sample in samples],
        source=source,
    )


def _all_but_last(rows: int) -> ndarray:
    return np.arange(rows) < rows - 1
