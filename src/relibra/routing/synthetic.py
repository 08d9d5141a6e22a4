"""Synthetic routes with known properties, for tests and benchmarks.

Tokens pick K different experts by Plackett-Luce sampling (the K largest of log-weight + Gumbel noise), so popular
experts are picked more often and no expert twice. The same generator state gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray
from numpy.random import Generator

from relibra.errors import ConfigError
from relibra.routing.demand import ScheduledDemand
from relibra.routing.micro_batches import schedule_samples
from relibra.routing.trace import RoutingTrace, expert_dtype

_CHUNK_ENTRIES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """Sizes of a synthetic trace: rows of each sample, MoE layers, experts, choices per token."""

    rows_per_sample: Sequence[int]
    num_layers: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible sizes."""
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"a token cannot pick {self.top_k} different experts of {self.num_experts}")
        if self.num_layers < 1 or not self.rows_per_sample or min(self.rows_per_sample) < 0:
            raise ConfigError(
                f"a trace needs layers and samples: got {self.num_layers} and {len(self.rows_per_sample)}"
            )


def domain_trace(
    shape: TraceShape, rng: Generator, *, num_domains: int = 4, sigma: float = 0.8, drift: float = 0.5
) -> RoutingTrace:
    """Generate routes of a mixture of domains, each with hot experts that drift from first to last sample.

    A domain's log-popularity turns from one normal draw towards another: cos(angle) A + sin(angle) B, with
    angle = drift (pi / 2) s / (S - 1) at sample s, so its spread stays `sigma` while its hot experts change.

    sigma     standard deviation of log-popularity: about 0.35 after balanced training, 0.8 in recorded inference
    drift     0: constant popularity; 1: that of the last sample is independent of the first of its domain
    returns   group id = domain
    """
    S, L, E = len(shape.rows_per_sample), shape.num_layers, shape.num_experts
    ends_2XLE = rng.normal(scale=sigma, size=(2, num_domains, L, E))
    domain_S = rng.integers(num_domains, size=S)
    angle_S = drift * np.pi / 2 * np.arange(S) / max(1, S - 1)
    sample_T = np.repeat(np.arange(S), shape.rows_per_sample)
    experts_LTK = []
    for layer in range(L):
        start_SE, end_SE = ends_2XLE[0, domain_S, layer], ends_2XLE[1, domain_S, layer]
        log_weight_SE = np.cos(angle_S)[:, None] * start_SE + np.sin(angle_S)[:, None] * end_SE
        experts_LTK.append(_draw_experts(log_weight_SE[sample_T], shape.top_k, rng))
    experts_TLK = np.stack(experts_LTK, axis=1).astype(expert_dtype(shape.num_experts))
    samples = np.split(experts_TLK, np.cumsum(shape.rows_per_sample)[:-1])
    source = f"synthetic domains, {num_domains}, drift {drift:g}"
    return RoutingTrace.from_samples(samples, num_experts=shape.num_experts, group_ids=domain_S.tolist(), source=source)


def demo_demand(
    num_ranks: int = 16,
    *,
    rank_tokens: int = 2048,
    num_micro_batches: int = 4,
    num_layers: int = 2,
    num_experts: int = 64,
    seed: int = 0,
) -> ScheduledDemand:
    """Return a small step of skewed routes, to plan without a recording: 4 choices per token.

    Routes are those of `domain_trace`; each rank has 4 samples of equal length in each micro-batch.

    rank_tokens   of each rank in each micro-batch, a multiple of 4
    raises        ConfigError for sizes below 1, or tokens that 4 samples cannot share

    >>> demo_demand(8, num_micro_batches=2).tokens_MLRE.shape
    (2, 2, 8, 64)
    """
    if min(num_ranks, rank_tokens, num_micro_batches) < 1 or rank_tokens % 4:
        raise ConfigError(
            f"a step of {num_micro_batches} micro-batches and {rank_tokens} tokens on {num_ranks} ranks: at least 1 "
            "each, tokens in multiples of 4"
        )
    rows_per_sample = [rank_tokens // 4] * (4 * num_micro_batches * num_ranks)
    top_k = min(4, num_experts)
    shape = TraceShape(rows_per_sample=rows_per_sample, num_layers=num_layers, num_experts=num_experts, top_k=top_k)
    return schedule_samples(domain_trace(shape, np.random.default_rng(seed)), rank_tokens, num_ranks)


def _draw_experts(log_weight_TE: Float64[ndarray, "T E"], top_k: int, rng: Generator) -> Int64[ndarray, "T K"]:
    """Return K different experts per token, in no order; a bounded number of rows is drawn at a time."""
    T, E = log_weight_TE.shape
    picked_TK = np.empty((T, top_k), dtype=np.int64)
    step = max(1, _CHUNK_ENTRIES // E)
    for start in range(0, T, step):
        score_TE = log_weight_TE[start : start + step] + rng.gumbel(size=(min(step, T - start), E))
        picked_TK[start : start + step] = np.argpartition(-score_TE, top_k - 1, axis=1)[:, :top_k]
    return picked_TK
