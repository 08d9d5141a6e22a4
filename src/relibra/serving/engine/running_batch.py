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

from relibra.rl.rollout.philox import sampling_key, uniform_numbers_of_keys
from relibra.serving.engine.request import FinishReason, GenerateRequest, Progress
from relibra.serving.engine.sampling import sample_tokens
from relibra.serving.engine.slotted_cache import SlottedCache


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

    tokens     of the answer so far
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
    def latest(self) -> int:
        """The token that is fed next."""
        return self.tokens[-1] if self.tokens else self.request.tokens[-1]

    @property
    def goes_on(self) -> bool:
        """Whether it has neither ended nor been cancelled."""
        return self.finish is None and not self.cancelled

    def may_lend(self, other: Row) -> bool:
        """Return whether what it knows of its prompt is all that another row needs."""
        own, asked = self.request, other.request
        known = (own.sampling.routes or not asked.sampling.routes) and not asked.sampling.prompt_log_probs
        return known and own.tokens == asked.tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and answer if the answer ends at its limit."""
        return len(self.request.tokens) + self.request.sampling.limit

    def add(self, token: int, log_prob: float, log_prob_BV: Float[Tensor, "B V"], b: int) -> Progress:
        """Append a token; return what to tell about it.

        log_prob     of the token
        log_prob_BV  of all tokens, in row `b`
        """
        sampling = self.request.sampling
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
            values, ids = log_prob_BV[b].topk(min(sampling.top_log_probs, log_prob_BV.shape[1]))
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
    """Rows whose latest token is fed next. The cache holds the tokens before it, and no column without any."""

    rows: list[Row]
    cache: Cache

    @property
    def width(self) -> int:
        """Columns of the cache: tokens of the longest row, without its latest."""
        return max(row.length for row in self.rows) - 1

    def step(self, forward: Forward) -> list[Progress]:
        """Feed the latest tokens and sample the next of each row, in place."""
        token_B1 = torch.tensor([[row.latest] for row in self.rows])
        length_B1 = torch.tensor([[row.length] for row in self.rows])
        mask_BC = torch.arange(self.width + 1) > self.width - length_B1
        logits_B1V, experts_BLK, _ = forward(token_B1, mask_BC, self.cache)
        for b, row in enumerate(self.rows):
            row.fed += 1
            if row.request.sampling.routes:
                row.experts.append(experts_BLK[b : b + 1].numpy())
        return sample_rows(self.rows, logits_B1V[:, 0])

    def going_on(self) -> RunningBatch | None:
        """Return the batch without rows that have ended or have been cancelled; None if all have.

        With slots, the last rows take the places of those that leave.
        """
        kept = [b for b, row in enumerate(self.rows) if row.goes_on]
        if len(kept) == len(self.rows):
            return self
        if not kept:
            return None
        if isinstance(self.cache, SlottedCache):
            kept = self.cache.keep(kept, max(self.rows[b].length for b in kept) - 1)
        else:
            self.cache.reorder_cache(torch.tensor(kept))
        return RunningBatch([self.rows[b] for b in kept], self.cache)

    def begin_like(self, fresh: Row, most_places: int) -> RunningBatch | None:
        """Return a batch with a fresh row that begins with the prompt of a running one; None if there is none.

        All of its prompt but the last token is copied; a step feeds that one, and samples the first of the answer.

        most_places   that the cache may have then
        """
        lender = next((b for b, row in enumerate(self.rows) if row.may_lend(fresh)), None)
        if (
            lender is None
            or not isinstance(self.cache, SlottedCache)
            or not self.cache.holds_all(self.rows[lender].fed)
        ):
            return None
        fresh.fed = len(fresh.request.tokens) - 1
        if fresh.request.sampling.routes:
            fresh.experts.append(np.concatenate(self.rows[lender].experts)[: fresh.fed])
        longer = RunningBatch([*self.rows, fresh], self.cache)
        longer.make_room(most_places)
        self.cache.copy_beginning(lender, self.rows[lender].fed - fresh.fed)
        return longer

    def make_room(self, most_places: int) -> None:
        """Have room for the next step, and no more than so many places."""
        if isinstance(self.cache, SlottedCache):
            self.cache.make_room(len(self.rows), self.width + 1, most_places)


def sample_rows(rows: Sequence[Row], logits_BV: Float[Tensor, "B V"]) -> list[Progress]:
    """Sample the next token of each row, and append it."""
    uniform_B = uniform_numbers_of_keys(
        np.array([row.key for row in rows], dtype=np.uint64).T,
        np.array([row.request.sampling.sample for row in rows]),
        np.array([len(row.tokens) for row in rows]),
    )
    token_B, log_prob_BV = sample_tokens(logits_BV, [row.request.sampling for row in rows], uniform_B)
    log_prob_B = log_prob_BV.gather(1, token_B[:, None])[:, 0].tolist()
    return [
        row.add(token, log_prob, log_prob_BV, b)
        for b, (row, token, log_prob) in enumerate(zip(rows, token_B.tolist(), log_prob_B, strict=True))
    ]


def join(
    batch: RunningBatch | None,
    fresh: Sequence[Row],
    cache: SlottedCache,
    rows_of_cache: Sequence[int],
    most_places: int,
) -> RunningBatch:
    """Return a batch with fresh rows behind those that run, all in the slots of one cache.

    batch           None: nothing runs
    cache           of the fresh rows; it is empty then
    rows_of_cache   the row of each fresh one; a row may be named several times
    most_places     that the joined cache may have
    """
    rows = [*(batch.rows if batch else ()), *fresh]
    joined = RunningBatch(rows, batch.cache if batch else cache.empty())
    assert isinstance(joined.cache, SlottedCache), "others are not joined"
    joined.make_room(most_places)
    joined.cache.take_in(cache, rows_of_cache, joined.width)
    return joined
