"""`RunningBatch`: rows that are decoded together with one KV cache, and how others join and leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor
from transformers import Cache

from relibra.rl.rollout.kv_caches import join_caches, last_columns
from relibra.rl.rollout.philox import sampling_key, uniform_numbers_of_keys
from relibra.serving.engine.request import FinishReason, GenerateRequest, Progress
from relibra.serving.engine.sampling import sample_tokens


@runtime_checkable
class Forward(Protocol):
    """Runs the model."""

    def __call__(
        self, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: Cache | None, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor, Cache]:
        """Return the logits of the last columns, the routes `[B * N, L, K]` and the cache.

        mask_BC   of the cache and the tokens
        cache     None: the model makes its own
        last      columns of logits; 0: all
        """
        ...


@dataclass(eq=False)
class Row:
    """A request under way.

    fed        tokens in the cache
    experts    routes of each piece that was fed, where they are asked for
    scores     log-probs of pieces of the prompt, where they are asked for
    admitted   its prompt is being fed, or has been
    """

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    experts: list[ndarray] = field(default_factory=list)
    scores: list[ndarray] = field(default_factory=list)
    fed: int = 0
    admitted: bool = False
    cancelled: bool = False
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        """Derive the key of the random numbers, once."""
        self.key = sampling_key(self.request.sampling.seed)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.request.tokens) + len(self.tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens at the latest end of the answer."""
        return len(self.request.tokens) + self.request.sampling.limit

    def add(self, token: int, log_prob_V: Float[Tensor, " V"]) -> Progress:
        """Append a token; return what to tell about it."""
        sampling, log_prob = self.request.sampling, float(log_prob_V[token])
        if not math.isfinite(log_prob):
            self.finish = "error"
            return Progress(
                number=self.request.number,
                finish="error",
                error=f"the model gives token {len(self.tokens)} of the answer the log-prob {log_prob}: its weights "
                "are broken",
            )
        self.tokens.append(token)
        if token in sampling.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == sampling.limit:
            self.finish = "length"
        top: tuple[tuple[int, float], ...] = ()
        if sampling.top_log_probs:
            values, ids = log_prob_V.topk(min(sampling.top_log_probs, len(log_prob_V)))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        routes = np.concatenate(self.experts) if self.finish and self.experts else None
        return Progress(
            number=self.request.number,
            token=token,
            log_prob=log_prob,
            top=top,
            finish=self.finish,
            routes=routes,
            prompt_log_probs=np.concatenate(self.scores) if self.scores and len(self.tokens) == 1 else None,
        )


@dataclass(frozen=True)
class RunningBatch:
    """Rows whose latest token is fed next.

    token_B    the latest token of each row
    mask_BC    which columns of the cache, and then the latest token, hold tokens; padding comes first in each row
    """

    rows: list[Row]
    token_B: Int[Tensor, " B"]
    mask_BC: Bool[Tensor, "B C"]
    cache: Cache

    def step(self, forward: Forward) -> list[Progress]:
        """Feed the latest tokens and sample the next of each row, in place."""
        logits_B1V, experts_BLK, _ = forward(self.token_B[:, None], self.mask_BC, self.cache)
        for b, row in enumerate(self.rows):
            row.fed += 1
            if row.request.sampling.routes:
                row.experts.append(experts_BLK[b : b + 1].numpy())
        return sample_rows(self.rows, logits_B1V[:, 0])

    def next(self) -> RunningBatch | None:
        """Return the batch that feeds the tokens sampled by `step`; None if all rows have ended."""
        return keep_unfinished(self.rows, torch.nn.functional.pad(self.mask_BC, (0, 1), value=True), self.cache)

    def without_cancelled(self) -> RunningBatch | None:
        """Return the batch before its next step, without rows that have been cancelled; None if all have."""
        return keep_unfinished(self.rows, self.mask_BC, self.cache)


def keep_unfinished(rows: list[Row], mask_BC: Bool[Tensor, "B C"], cache: Cache) -> RunningBatch | None:
    """Return a batch of the rows that go on; None if all have ended.

    mask_BC   columns of the cache and the latest token
    """
    kept = [b for b, row in enumerate(rows) if row.finish is None and not row.cancelled]
    if not kept:
        return None
    if len(kept) < len(rows):
        kept_B = torch.tensor(kept)
        cache.reorder_cache(kept_B)
        rows, mask_BC = [rows[b] for b in kept], mask_BC[kept_B]
    return RunningBatch(rows, torch.tensor([row.tokens[-1] for row in rows]), mask_BC, cache)


def sample_rows(rows: Sequence[Row], logits_BV: Float[Tensor, "B V"]) -> list[Progress]:
    """Sample the next token of each row, and append it."""
    uniform_B = uniform_numbers_of_keys(
        np.array([row.key for row in rows], dtype=np.uint64).T,
        np.array([row.request.sampling.sample for row in rows]),
        np.array([len(row.tokens) for row in rows]),
    )
    token_B, log_prob_BV = sample_tokens(logits_BV, [row.request.sampling for row in rows], uniform_B)
    return [row.add(token, log_prob_BV[b]) for b, (row, token) in enumerate(zip(rows, token_B.tolist(), strict=True))]


def join(batches: Sequence[RunningBatch]) -> RunningBatch:
    """Join batches that feed one token next, without columns that are padding in all rows."""
    if len(batches) == 1:
        return batches[0]
    rows = [row for batch in batches for row in batch.rows]
    columns = max(row.length for row in rows)
    return RunningBatch(
        rows,
        torch.cat([batch.token_B for batch in batches]),
        torch.cat([last_columns(batch.mask_BC, columns, dim=1) for batch in batches]),
        join_caches([batch.cache for batch in batches], columns - 1),
    )
