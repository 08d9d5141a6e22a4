"""The embedded engine: batched sampling with a KV cache inside the training process, routes recorded on the way.

It handles token ids, not text. Every rank holds a full copy of the policy and samples its own share of the responses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from numpy import ndarray
from torch import Tensor, nn
from transformers import Cache

from relibra.errors import EngineError
from relibra.replay import RoutingRecorder, record_routing
from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.rollout.kv_caches import can_join, growing_cache, join_caches, last_columns
from relibra.rl.rollout.philox import uniform_numbers
from relibra.rl.rollout.response import Response, RolloutCost, Window

PREFILL_TOKENS = 1 << 15
"""Most tokens, padding included, of one prefill pass, unless a single response has more: bounds its memory."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedEngine:
    """Samples from a model that is already in this process.

    model         full copy of the policy, in evaluation mode
    stop_ids      tokens that end a response
    temperature   of sampling; log-probs are those of the tempered policy
    seed          with the sample's id and the token's position in the response, determines the random numbers
    max_batch     responses decoded at once: the slots of the batch
    record        record the experts of every token; False: a model without experts, or with unknown routers
    shortest      a spare begins only if there is time for this many tokens

    With more responses than slots, waiting ones take the slots of those that ended (refill): they are prefilled
    together and joined to the running batch. A refill costs about one decode step of the whole batch, so it waits until
    idle slots have cost as much, which minimises the total for any lengths (economic order quantity). Models whose
    caches cannot be joined get a new batch when the old one has ended.

    In the cost, the pass that fills an empty batch counts as a decode step, because it adds a token to every running
    response; a refill does not. Both are passes, and more than one where a prefill is cut.

    With spares a call is at most `window` decode steps: free slots take a spare by the same rule, while the steps left
    repay the refill and are enough for `shortest` tokens: one in the refill and one in each step left. When all
    responses have ended and no spare may begin, the call ends early.
    """

    model: nn.Module
    pad_id: int
    stop_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_batch: int
    record: bool = True
    shortest: int = 1

    @torch.inference_mode()
    def generate(
        self, responses: Sequence[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; see `RolloutEngine`.

        raises    EngineError for an empty prompt, probabilities that are not finite, or where the model's routes cannot
                  be recorded (`record_routing`)
        """
        assert spare is None or len(responses) <= self.max_batch, "with spares, each response needs a slot"
        rows = [_Row(response, min(window, max_response - response.length)) for response in responses]
        queue = _Queue(rows, spare if rows else None, window, max_response, self.shortest)
        with record_routing(self.model) if self.record else nullcontext() as recorder:
            cost = self._decode(queue, min(self.max_batch, len(rows)), recorder)
        return [row.window() for row in queue.rows], cost

    def _decode(self, queue: _Queue, slots: int, recorder: RoutingRecorder | None) -> RolloutCost:
        """Sample until every row has ended and none is waiting."""
        tally, batch = _Tally(slots), None
        while True:
            running = len(batch.rows) if batch else 0
            joins = batch is None or (tally.refill_is_due and can_join(batch.cache))
            if joins and (fresh := queue.take(slots - running, tally.steps_with(running), slots)):
                pieces = list(self._prefilled(fresh, recorder))
                tally.prefill(fresh, len(pieces), running)
                batch = _joined([piece for piece in (batch, *pieces) if piece])
            elif batch:
                batch = self._step(batch, recorder)
                tally.decode(running, len(batch.rows) if batch else 0)
            else:
                return tally.cost()

    def _prefilled(self, rows: Sequence[_Row], recorder: RoutingRecorder | None) -> Iterator[_Batch | None]:
        """Feed rows that begin, and sample the first token of each; yield a batch per pass, None if all end.

        Rows of a pass have at least half the length of the longest: unfinished responses are much longer than prompts.
        """
        device = next(self.model.parameters()).device
        by_length = sorted(rows, key=lambda row: -len(row.response.tokens_n))
        while by_length:
            cache = growing_cache(self.model.config)
            width = len(by_length[0].response.tokens_n)
            alike = sum(2 * len(row.response.tokens_n) >= width for row in by_length)
            count = max(1, min(alike, PREFILL_TOKENS // width)) if can_join(cache) else len(by_length)
            chunk, by_length = by_length[:count], by_length[count:]
            input_BN, mask_BN = _left_pad([row.response.tokens_n for row in chunk], self.pad_id)
            yield self._step(_Batch(chunk, input_BN.to(device), mask_BN.to(device), cache), recorder)

    def _step(self, batch: _Batch, recorder: RoutingRecorder | None) -> _Batch | None:
        """Feed the input and sample one more token for each row; return the rows that are not ended, or None."""
        width = batch.input_BN.shape[1]
        logits_BV = self.model(
            input_ids=batch.input_BN,
            attention_mask=batch.mask_BC.long(),
            position_ids=(batch.mask_BC.cumsum(dim=1) - 1).clamp(min=0)[:, -width:],
            use_cache=True,
            logits_to_keep=1,
            **{CACHE_NAME: batch.cache},
        ).logits[:, -1]
        uniform_B = uniform_numbers(
            self.seed,
            np.array([row.response.sample_id for row in batch.rows]),
            np.array([row.position for row in batch.rows]),
        )
        token_B, log_prob_B = _sample(logits_BV, self.temperature, uniform_B)
        for row, token, log_prob in zip(batch.rows, token_B.tolist(), log_prob_B.tolist(), strict=True):
            row.add(token, log_prob, stopped=token in self.stop_ids)
        if recorder is not None:
            _assign_routes(batch, recorder)
        return batch.continued(token_B)


@dataclass
class _Tally:
    """Cost of a call so far, with the meanings of `RolloutCost`.

    idle   slots x decode steps without a row since the last prefill
    """

    slots: int
    decode_steps: int = 0
    passes: int = 0
    busy: int = 0
    prefilled_tokens: int = 0
    idle: int = 0

    @property
    def refill_is_due(self) -> bool:
        """Return whether idle slots have cost as much as a refill: a decode step of all slots."""
        return self.idle >= self.slots

    def steps_with(self, running: int) -> int:
        """Return the decode steps after a prefill beside `running` rows: into an empty batch it counts as one."""
        return self.decode_steps + (not running)

    def prefill(self, fresh: Sequence[_Row], passes: int, running: int) -> None:
        """Count a prefill of rows beside `running` others."""
        self.decode_steps = self.steps_with(running)
        self.busy += 0 if running else len(fresh)
        self.passes += passes
        self.prefilled_tokens += sum(len(row.response.tokens_n) for row in fresh)
        self.idle = 0

    def decode(self, running: int, left: int) -> None:
        """Count a decode step of `running` rows; `left` of them are not ended."""
        self.decode_steps += 1
        self.passes += 1
        self.busy += running
        self.idle += self.slots - left

    def cost(self) -> RolloutCost:
        return RolloutCost(
            decode_steps=self.decode_steps,
            passes=self.passes,
            slot_steps=self.decode_steps * self.slots,
            busy_slot_steps=self.busy,
            prefilled_tokens=self.prefilled_tokens,
        )


@dataclass
class _Queue:
    """Rows of a call in the order in which they begin: the given ones, then spares while steps are left.

    rows       all that have begun or are certain to
    spare      responses that may begin beyond them; None: none
    shortest   a spare begins only if there is time for this many tokens
    taken      rows that have begun
    """

    rows: list[_Row]
    spare: Iterator[Response] | None
    window: int
    max_response: int
    shortest: int
    taken: int = 0

    def take(self, free: int, steps: int, slots: int) -> list[_Row]:
        """Return the rows that begin in free slots; `steps`: decode steps so far, with this prefill if it is one."""
        if self.spare is not None and self.taken == len(self.rows):
            left = self.window - steps
            repays = free == slots or free * left >= slots  # in an empty batch the pass itself is a decode step
            if repays and left + 1 >= self.shortest:
                limit = min(left + 1, self.max_response)
                self.rows += [_Row(response, limit) for response in islice(self.spare, free)]
        fresh = self.rows[self.taken : self.taken + free]
        self.taken += len(fresh)
        return fresh


@dataclass
class _Row:
    """A running response: tokens of this window, and the routes of each position fed so far."""

    response: Response
    limit: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[ndarray] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        sample = f"sample {self.response.sample_id}"
        assert self.response.finish_reason is None, f"{sample} is finished: it cannot be continued"
        assert self.limit > 0, f"{sample} may not grow: its window is {self.limit}"
        if not len(self.response.tokens_n):
            raise EngineError(f"{sample} has an empty prompt: a policy needs one token to start from; drop this prompt")

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.response.tokens_n) + len(self.tokens)

    @property
    def position(self) -> int:
        """Position of the next token in the response."""
        return self.response.length + len(self.tokens)

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.tokens) == self.limit

    def add(self, token: int, log_prob: float, *, stopped: bool) -> None:
        if not math.isfinite(log_prob):
            raise EngineError(
                f"sample {self.response.sample_id}: the policy gives response token {self.position} "
                f"the log-prob {log_prob}: its weights are broken; resume from an earlier checkpoint with a lower "
                "update.learning_rate"
            )
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.stopped = stopped

    def window(self) -> Window:
        return Window(
            tokens_w=np.array(self.tokens, dtype=np.int64),
            log_probs_w=np.array(self.log_probs, dtype=np.float32),
            experts_mLK=np.concatenate(self.experts) if self.experts else None,
            stopped=self.stopped,
        )


@dataclass(frozen=True)
class _Batch:
    """Rows decoded together.

    input_BN   tokens to be fed next: the left-padded prefix at first, then the latest token
    mask_BC    which columns of the cache, and then of the input, hold tokens; in each row padding comes first
    """

    rows: list[_Row]
    input_BN: Int[Tensor, "B N"]
    mask_BC: Bool[Tensor, "B C"]
    cache: Cache

    def continued(self, token_B: Int[Tensor, " B"]) -> _Batch | None:
        """Return the batch that feeds these tokens, without rows that have ended."""
        kept = [b for b, row in enumerate(self.rows) if not row.ended]
        if not kept:
            return None
        mask_BC = torch.nn.functional.pad(self.mask_BC, (0, 1), value=True)
        if len(kept) < len(self.rows):
            kept_B = torch.tensor(kept, device=token_B.device)
            self.cache.reorder_cache(kept_B)
            mask_BC, token_B = mask_BC[kept_B], token_B[kept_B]
        return _joined([_Batch([self.rows[b] for b in kept], token_B[:, None], mask_BC, self.cache)])


def _joined(batches: Sequence[_Batch]) -> _Batch | None:
    """Join batches that feed one token next, without columns that are padding in all rows."""
    if not batches:
        return None
    rows = [row for batch in batches for row in batch.rows]
    columns = max(row.length for row in rows)
    if len(batches) == 1 and (columns == batches[0].mask_BC.shape[1] or not can_join(batches[0].cache)):
        return batches[0]
    return _Batch(
        rows,
        torch.cat([batch.input_BN for batch in batches]),
        torch.cat([last_columns(batch.mask_BC, columns, dim=1) for batch in batches]),
        join_caches([batch.cache for batch in batches], columns - 1),
    )


def _assign_routes(batch: _Batch, recorder: RoutingRecorder) -> None:
    """Append the routes of the last forward pass to their rows; those of padding are dropped."""
    [experts_TLK] = recorder.take()
    experts_BNLK = experts_TLK.view(*batch.input_BN.shape, *experts_TLK.shape[1:]).cpu().numpy()
    width = batch.input_BN.shape[1]
    token_BN = batch.mask_BC[:, -width:].cpu().numpy()
    for b, row in enumerate(batch.rows):
        row.experts.append(experts_BNLK[b] if width == 1 else experts_BNLK[b][token_BN[b]])


def _left_pad(sequences: Sequence[ndarray], pad_id: int) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N"]]:
    width = max(map(len, sequences))
    input_BN = np.full((len(sequences), width), pad_id, dtype=np.int64)
    mask_BN = np.zeros((len(sequences), width), dtype=bool)
    for b, tokens_n in enumerate(sequences):
        input_BN[b, width - len(tokens_n) :] = tokens_n
        mask_BN[b, width - len(tokens_n) :] = True
    return torch.from_numpy(input_BN), torch.from_numpy(mask_BN)


def _sample(
    logits_BV: Float[Tensor, "B V"], temperature: float, uniform_B: Float64[ndarray, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the token of each row at which the cumulative distribution passes its uniform number, and its log-prob."""
    log_prob_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    uniform_B1 = torch.from_numpy(uniform_B).to(logits_BV.device)[:, None]
    cumulative_BV = log_prob_BV.double().exp().cumsum(dim=-1)
    token_B = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True).squeeze(1)
    token_B = token_B.clamp(max=logits_BV.shape[1] - 1)
    return token_B, log_prob_BV.gather(1, token_B[:, None]).squeeze(1)
