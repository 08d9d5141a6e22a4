"""An attention worker: the model without experts, channels to the expert workers, and a thread for each micro-batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relibra.engine.engine import Engine, EngineLimits
from relibra.engine.forward import run_model
from relibra.engine.kv_cache import SlottedCache, cache_bytes
from relibra.engine.sequence import Sequence
from relibra.errors import EngineError, RelibraError, in_a_line
from relibra.replay.forward_cache import CACHE_NAME
from relibra.replay.record import narrow_dtype
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.checkpoint import load_attention, open_checkpoint, read_structure
from relibra.serving.roles.remote_experts import ComputeToken, RemoteExperts, use_remote_experts, without_experts
from relibra.timeline import TimelineRecorder

REJOIN_TRIES = 3
"""Rounds, the first one included, in which an expert worker that does not answer is tried."""
Listener = Callable[[list[Sequence]], None]
"""Gets the sequences that have a new token or have ended; called by the threads of all micro-batches."""


class MicroBatch:
    """Requests of one micro-batch.

    engine    used by the thread alone; other threads only read its figures
    experts   channels to the expert workers
    """

    def __init__(
        self, model: nn.Module, experts: RemoteExperts, limits: EngineLimits, pad_id: int, listener: Listener
    ) -> None:
        """Start the thread, without requests."""
        self.experts = experts
        self.engine = Engine(self._forward, model.config, limits, pad_id=pad_id)
        self._model, self._listener = model, listener
        self._route_dtype = narrow_dtype(experts.load_LE.shape[1])
        self._work = threading.Condition()
        self._sequences: dict[int, Sequence] = {}
        self._fresh: list[Sequence] = []
        self._cancelled: list[int] = []
        self._rejoining: dict[int, tuple[str, tuple[tuple[int, ...], ...], int]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"micro-batch {experts.exchange.slot}", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._sequences)

    def has_prompt(self, tokens: tuple[int, ...], *, waiting: bool = False) -> bool:
        """Return whether a request with this prompt waits or runs; with `waiting`, whether one still waits."""
        with self._work:
            known = self._sequences.values()
            return any(one.prompt == tokens and not (waiting and one.fed) for one in known)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request."""
        with self._work:
            self._sequences[sequence.number] = sequence
            self._fresh.append(sequence)
            self._work.notify()

    def cancel(self, number: int) -> None:
        """End a request at the next step; unknown numbers are ignored."""
        with self._work:
            if number in self._sequences:
                self._cancelled.append(number)
                self._work.notify()

    def rejoin(self, worker: int, address: str, experts: Iterable[Iterable[int]]) -> None:
        """Use an expert worker that was started again, or holds other experts, from the next step on."""
        with self._work:
            self._rejoining[worker] = address, tuple(map(tuple, experts)), REJOIN_TRIES
            self._work.notify()

    def close(self) -> None:
        """Let the thread end after its step, and wait for it."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        """Serve until closed. An error ends the requests of this micro-batch, not the process."""
        while self._await_work():
            try:
                self._rejoin_workers()
                self._take_requests()
                self._report(self.engine.step())
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: its requests get the sentence
                self._end_all(str(error) if isinstance(error, RelibraError) else in_a_line(error))

    def _await_work(self) -> bool:
        with self._work:
            self._work.wait_for(lambda: self._closed or self._sequences or self._rejoining)
            return not self._closed

    def _rejoin_workers(self) -> None:
        """Open channels to workers that were started again; one that does not answer is tried again in later rounds."""
        with self._work:
            rejoining, self._rejoining = self._rejoining, {}
        for worker, (address, experts, tries) in rejoining.items():
            try:
                self.experts.exchange.rejoin(worker, address, experts)
            except EngineError:  # it is gone again, or busy: the next exchange raises where it matters
                if tries > 1:
                    with self._work:  # where it has been started again meanwhile, the new address counts
                        self._rejoining.setdefault(worker, (address, experts, tries - 1))

    def _take_requests(self) -> None:
        """Hand new requests to the engine, and take cancelled ones out of it."""
        with self._work:
            fresh, self._fresh = self._fresh, []
            cancelled = [self._sequences[number] for number in self._cancelled if number in self._sequences]
            self._cancelled = []
        for sequence in fresh:
            self.engine.add(sequence)
        if cancelled:
            for sequence in cancelled:
                sequence.finish = "cancelled"
            self.engine.drop_finished()
            self._report(cancelled)

    def _end_all(self, error: str) -> None:
        with self._work:
            sequences, self._fresh = list(self._sequences.values()), []
        for sequence in sequences:
            sequence.finish, sequence.error = "lost", error
        self.engine.drop_finished()
        self._report(sequences)

    def _report(self, sequences: Iterable[Sequence]) -> None:
        """Hand sequences to the listener, and forget those that have ended."""
        with self._work:
            known = [sequence for sequence in sequences if sequence.number in self._sequences]
            for sequence in known:
                if sequence.finish is not None:
                    self._sequences.pop(sequence.number, None)
        if known:
            self._listener(known)

    def _forward(
        self, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor | None]:
        """Run the model with remote experts, see `Forward`."""
        mask_T = mask_BC[:, -input_BN.shape[1] :].reshape(-1)
        with self.experts.forward_pass(mask_T) as routes_LTK:
            logits_BZV = run_model(self._model, input_BN, mask_BC, cache, last)
        return logits_BZV, torch.stack(routes_LTK, dim=1).to(self._route_dtype)


class AttentionWorker:
    """An attention worker that has loaded its part, and runs once it is connected."""

    def __init__(
        self,
        folder: Path,
        layout: WorkerLayout,
        number: int,
        dtype: str = "auto",
        recorder: TimelineRecorder | None = None,
    ) -> None:
        """Load everything of a model but its experts, as worker `number`; raises as `read_structure` does."""
        structure = read_structure(folder, dtype)
        self.layout, self.number, self._recorder = layout, number, recorder
        self.token = ComputeToken()
        self.model: Any = load_attention(structure, open_checkpoint(folder))
        use_remote_experts(self.model, structure.experts)
        self.shape = ExchangeShape(
            experts_of=(),
            max_tokens=layout.max_tokens,
            top_k=structure.top_k,
            hidden=structure.hidden,
            dtype=structure.dtype,
        )
        self.most_cache_bytes = _most_cache_bytes(self.model, layout)
        self.micro_batches: list[MicroBatch] = []

    def connect(self, experts: Several[Several[Any]], secret: bytes, listener: Listener) -> None:
        """Open channels to expert workers, each as (address, experts by layer), and start the threads.

        raises   EngineError
        """
        layout, addresses = self.layout, [address for address, _ in experts]
        self.shape = replace(self.shape, experts_of=tuple(tuple(map(tuple, held)) for _, held in experts))
        exchanges = [
            SlotExchange(addresses, self.shape, attention=self.number, slot=slot, secret=secret, timeout=layout.timeout)
            for slot in range(layout.micro_batches)
        ]
        limits = EngineLimits(
            max_running=layout.max_running, kv_tokens=layout.micro_batch_kv_tokens, max_tokens=layout.max_tokens
        )
        pad_id = self.model.config.get_text_config().pad_token_id or 0
        self.micro_batches = [
            MicroBatch(
                self.model, RemoteExperts(exchange, self.token, layout.cap, self._recorder), limits, pad_id, listener
            )
            for exchange in exchanges
        ]

    def submit(self, sequence: Sequence) -> None:
        """Give a request to the micro-batch where its prompt waits, else to the one with the fewest requests.

        Ties: the one where its prompt runs, then the first.
        """
        prompt = sequence.prompt
        waiting = next((one for one in self.micro_batches if one.has_prompt(prompt, waiting=True)), None)
        chosen = waiting or min(self.micro_batches, key=lambda one: (one.unfinished, not one.has_prompt(prompt)))
        chosen.submit(sequence)

    def cancel(self, number: int) -> None:
        """End a request at the next step; unknown numbers are ignored."""
        for one in self.micro_batches:
            one.cancel(number)

    def rejoin(self, expert_worker: int, address: str, experts: Several[Several[int]]) -> None:
        """Use an expert worker that was started again, or holds other experts."""
        for one in self.micro_batches:
            one.rejoin(expert_worker, address, experts)

    def load(self) -> list[list[int]]:
        """Return the load of each expert in each layer: its choices since the start."""
        return sum(one.experts.load_LE for one in self.micro_batches).tolist()  # type: ignore[union-attr]

    def counters(self) -> dict[str, int | float]:
        """Return counts of all micro-batches, the seconds in which any computed, and bytes and use of the KV cache."""
        total: Counter[str] = Counter()
        for one in self.micro_batches:
            total.update(vars(one.experts.exchange.counters))
        engines = [one.engine for one in self.micro_batches]
        return {
            **total,
            "busy_seconds": self.token.busy_seconds,
            "kv_cache_bytes": sum(one.cache_bytes for one in engines),
            "kv_cache_most_bytes": self.most_cache_bytes,
            "kv_cache_usage": sum(one.cache_usage for one in engines) / self.layout.micro_batches,
        }

    def close(self) -> None:
        """Stop the micro-batches and close all channels."""
        for one in self.micro_batches:
            one.close()
            one.experts.exchange.close()


@torch.inference_mode()
def _most_cache_bytes(model: Any, layout: WorkerLayout) -> int:
    """Return the bytes of a full KV cache, from the caches of one and of two tokens.

    What does not grow with tokens, such as states of linear attention, is there once per request.
    """
    with without_experts():
        one, two = (
            cache_bytes(model(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=True)[CACHE_NAME])
            for tokens in (1, 2)
        )
    per_token, per_request = two - one, 2 * one - two
    return layout.micro_batches * (layout.micro_batch_kv_tokens * per_token + layout.max_running * per_request)
