"""`MicroBatch`: the loop of one micro-batch: admit, feed a piece of a prompt, decode a step, tell what came of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor, nn
from transformers import Cache

from relibra.errors import EngineError, RelibraError, in_a_line
from relibra.replay.forward_cache import CACHE_NAME
from relibra.replay.record import narrow_dtype
from relibra.serving.engine.prefill import MOST_SCORES, Prefill, group_prompts, share_prompts
from relibra.serving.engine.request import GenerateRequest, Progress
from relibra.serving.engine.running_batch import Row, RunningBatch
from relibra.serving.engine.slotted_cache import cache_bytes, has_slots
from relibra.serving.roles.remote_experts import RemoteExperts

Listener = Callable[[list[Progress]], None]
"""Is told what each step adds; called by the threads of all micro-batches."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of one micro-batch.

    max_rows      requests decoded together
    max_places    of the KV cache: running requests x tokens that the longest of them may reach, as rows of one
                  cache have one width
    max_tokens    tokens of one forward pass
    """

    max_rows: int
    max_places: int
    max_tokens: int


@dataclass(frozen=True)
class _Rejoin:
    """An expert worker that was started again, or holds other experts."""

    address: str
    experts: tuple[int, ...]
    tries_left: int = 2


class MicroBatch:
    """Requests of one micro-batch, and the thread that runs them.

    steps          forward passes that decoded
    prefills       forward passes that fed a piece of prompts
    lent_prompts   prompts whose keys and values were copied from a running request instead
    """

    def __init__(
        self, model: nn.Module, experts: RemoteExperts, limits: EngineLimits, pad_id: int, listener: Listener
    ) -> None:
        """Begin without requests; `run` is the thread's."""
        self._model, self._experts, self._limits, self._pad_id = model, experts, limits, pad_id
        self._listener = listener
        self._route_dtype = narrow_dtype(len(experts.load_E))
        self._device = torch.device(experts.exchange.shape.device)
        self._can_join = has_slots(model.config)
        self._work = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._rows: dict[int, Row] = {}
        self._prefills: deque[Prefill] = deque()
        self._batch: RunningBatch | None = None
        self._rejoining: dict[int, _Rejoin] = {}
        self._closed = False
        self.steps, self.prefills, self.lent_prompts = 0, 0, 0

    @property
    def load_E(self) -> Int64[ndarray, " E"]:
        """Rows of each expert since the start."""
        return self._experts.load_E

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._rows)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache now."""
        batch, prefills = self._batch, list(self._prefills)
        return (cache_bytes(batch.cache) if batch else 0) + sum(one.cache_bytes for one in prefills)

    @property
    def cache_usage(self) -> float:
        """Share of the KV cache that requests under way may need; at 1 no other begins."""
        rows, columns = self._rows_and_width()
        return rows * columns / self._limits.max_places

    def awaits_prompt(self, tokens: tuple[int, ...]) -> bool:
        """Return whether the request that came last has exactly this prompt, and still waits."""
        with self._work:
            return bool(self._waiting) and self._waiting[-1].request.tokens == tokens

    def runs_prompt(self, tokens: tuple[int, ...]) -> bool:
        """Return whether a request with this prompt waits or runs."""
        with self._work:
            return any(row.request.tokens == tokens for row in self._rows.values())

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request."""
        with self._work:
            row = Row(request)
            self._rows[request.number] = row
            self._waiting.append(row)
            self._work.notify()

    def cancel(self, number: int) -> None:
        """End a request at the next step; unknown numbers are ignored."""
        with self._work:
            row = self._rows.get(number)
            if row is not None:
                row.cancelled = True
                self._work.notify()

    def rejoin(self, worker: int, address: str, experts: Sequence[int]) -> None:
        """Use an expert worker that was started again, or holds other experts, from the next step on."""
        with self._work:
            self._rejoining[worker] = _Rejoin(address, tuple(experts))
            self._work.notify()

    def close(self) -> None:
        """Let the thread end after its step."""
        with self._work:
            self._closed = True
            self._work.notify()

    @torch.inference_mode()
    def run(self) -> None:
        """Serve until closed. An error ends the requests of this micro-batch, not the process."""
        on_cuda = self._device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self._device)) if on_cuda else nullcontext():
            while self._await_work():
                try:
                    self._round()
                except Exception as error:  # noqa: BLE001 - the boundary of the thread: its requests get the sentence
                    self._fail_all(str(error) if isinstance(error, RelibraError) else in_a_line(error))

    def _await_work(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._closed or self._rows or self._rejoining)
            return not self._closed

    def _round(self) -> None:
        """Drop what was cancelled, admit what fits, feed one piece of a prompt, decode one step."""
        self._rejoin_workers()
        self._drop_cancelled()
        self._admit()
        if self._prefills:
            self._feed_piece(self._prefills.popleft())
        if self._batch is not None:
            progress = self._batch.step(self._forward)
            self.steps += 1
            self._batch = self._batch.going_on()
            self._tell(progress)

    def _rejoin_workers(self) -> None:
        """Open channels to workers that were started again; one that does not answer is tried again in later rounds."""
        with self._work:
            rejoining, self._rejoining = self._rejoining, {}
        for worker, one in rejoining.items():
            try:
                self._experts.exchange.rejoin(worker, one.address, one.experts)
            except EngineError:  # it is gone again, or busy: the next exchange says so where it matters
                if one.tries_left:
                    with self._work:  # where it has been started again meanwhile, the new address counts
                        self._rejoining.setdefault(worker, replace(one, tries_left=one.tries_left - 1))

    def _feed_piece(self, prefill: Prefill) -> None:
        most = self._limits.max_tokens
        if any(row.request.sampling.prompt_log_probs for row in prefill.rows):
            config: Any = self._model.config
            most = max(1, min(most, MOST_SCORES // config.get_text_config().vocab_size))
        progress = prefill.feed(self._forward, most)
        self.prefills += 1
        if progress is None:
            self._prefills.append(prefill)  # pieces in turn: a short prompt does not wait for a long one
            return
        self._batch = prefill.going_on(self._batch, self._places_left)
        self._tell(progress)

    def _admit(self) -> None:
        """Begin waiting requests, first come first served, within the limits of rows and places."""
        limits = self._limits
        if not self._can_join and (self._batch or self._prefills):
            return
        fresh: list[Row] = []
        rows, columns = self._rows_and_width()
        with self._work:
            while self._waiting and rows < limits.max_rows:
                row = self._waiting[0]
                widest = max(columns, row.most_tokens)
                if rows and (rows + 1) * widest > limits.max_places:
                    break
                if not self._can_join and fresh and len(row.request.tokens) != len(fresh[0].request.tokens):
                    break
                fresh.append(self._waiting.popleft())
                row.admitted = True
                rows, columns = rows + 1, widest
        fresh = [row for row in fresh if not self._begins_like_another(row)]
        if fresh:
            self._prefills.extend(self._begin(fresh))
        if self._batch is not None:
            self._batch.make_room(self._places_left)

    def _begins_like_another(self, row: Row) -> bool:
        """Let a row join those that run, if one of them has its prompt to lend; return whether it has joined."""
        longer = self._batch.begin_like(row, self._places_left) if self._batch else None
        if longer is None:
            return False
        self._batch = longer
        self.lent_prompts += 1
        return True

    def _rows_and_width(self) -> tuple[int, int]:
        """Return the requests with a place in the cache, and the tokens that the longest of them may reach."""
        parts = [one.rows for one in (self._batch, *self._prefills) if one is not None]
        most = [row.most_tokens for rows in parts for row in rows]
        return len(most), max(most, default=0)

    @property
    def _places_left(self) -> int:
        """Places of the cache that prompts under way leave to the running rows."""
        return self._limits.max_places - sum(one.room.places for one in self._prefills)

    def _begin(self, fresh: Sequence[Row]) -> Iterator[Prefill]:
        """Yield the prefills of rows: prompts to score apart from others, equal prompts once."""
        if not self._can_join:
            yield Prefill([[row] for row in fresh], None, self._pad_id)
            return
        scored = [row for row in fresh if row.request.sampling.prompt_log_probs]
        for rows in (scored, [row for row in fresh if not row.request.sampling.prompt_log_probs]):
            rows_of = share_prompts(rows)
            for group in group_prompts([len(one[0].request.tokens) for one in rows_of], self._limits.max_tokens):
                yield Prefill([rows_of[index] for index in group], self._model.config, self._pad_id)

    def _drop_cancelled(self) -> None:
        """End cancelled requests: those that wait or run at once, those of a prefill after it."""
        with self._work:
            gone = [row for row in self._rows.values() if row.cancelled]
            for row in gone:
                if not row.admitted:
                    self._waiting.remove(row)
        if not gone:
            return
        self._prefills = deque(one for one in self._prefills if not one.is_cancelled)
        if self._batch is not None and any(row in self._batch.rows for row in gone):
            self._batch = self._batch.going_on()
        self._tell([Progress(number=row.request.number, finish="cancelled") for row in gone])

    def _fail_all(self, sentence: str) -> None:
        with self._work:
            rows = list(self._rows.values())
            self._waiting.clear()
        self._prefills.clear()
        self._batch = None
        self._tell([Progress(number=row.request.number, finish="lost", error=sentence) for row in rows])

    def _tell(self, progress: Iterable[Progress]) -> None:
        """Tell the listener, and forget rows that have ended."""
        told = []
        with self._work:
            for one in progress:
                if one.number in self._rows:
                    told.append(one)
                    if one.finish is not None:
                        del self._rows[one.number]
        if told:
            self._listener(told)

    def _forward(
        self, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: Cache | None, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor, Cache]:
        """Run the model with remote experts, see `Forward`. Logits and routes come back on the host."""
        model: Any = self._model
        input_BN, mask_BC = input_BN.to(self._device), mask_BC.to(self._device)
        with self._experts.forward_pass() as routes_LTK:
            output = model(
                input_ids=input_BN,
                attention_mask=mask_BC.long(),
                position_ids=(mask_BC.cumsum(dim=1) - 1).clamp(min=0)[:, -input_BN.shape[1] :],
                use_cache=True,
                logits_to_keep=last,
                **{CACHE_NAME: cache},
            )
        routes_TLK = torch.stack(routes_LTK, dim=1).to(self._route_dtype)
        return output.logits.cpu(), routes_TLK.cpu(), output[CACHE_NAME]
