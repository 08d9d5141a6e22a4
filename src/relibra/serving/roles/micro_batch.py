"""`MicroBatch`: the thread of one micro-batch: it takes requests, runs its engine and reports what each step adds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relibra.engine.engine import Engine, EngineLimits
from relibra.engine.forward import run_model
from relibra.engine.kv_cache import SlottedCache
from relibra.engine.sequence import Sequence
from relibra.errors import EngineError, RelibraError, in_a_line
from relibra.replay.record import narrow_dtype
from relibra.serving.roles.remote_experts import RemoteExperts

REJOIN_TRIES = 3
"""Rounds in which an expert worker that does not answer is tried again."""
Listener = Callable[[list[Sequence]], None]
"""Gets the sequences that a step has added to; called by the threads of all micro-batches."""


class MicroBatch:
    """Requests of one micro-batch.

    engine    used by the thread alone, but for its figures
    experts   channels to the expert workers
    """

    def __init__(
        self, model: nn.Module, experts: RemoteExperts, limits: EngineLimits, pad_id: int, listener: Listener
    ) -> None:
        """Start the thread, without requests."""
        self.experts = experts
        self.engine = Engine(self._forward, model.config, limits, pad_id=pad_id)
        self._model, self._listener = model, listener
        self._route_dtype = narrow_dtype(len(experts.load_E))
        self._work = threading.Condition()
        self._sequences: dict[int, Sequence] = {}
        self._fresh: list[Sequence] = []
        self._cancelled: list[int] = []
        self._rejoining: dict[int, tuple[str, tuple[int, ...], int]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"micro-batch {experts.exchange.slot}", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._sequences)

    def has_prompt(self, tokens: tuple[int, ...], *, waiting: bool = False) -> bool:
        """Return whether a request with this prompt waits or runs; `waiting`: whether one waits."""
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

    def rejoin(self, worker: int, address: str, experts: Iterable[int]) -> None:
        """Use an expert worker that was started again, or holds other experts, from the next step on."""
        with self._work:
            self._rejoining[worker] = address, tuple(experts), REJOIN_TRIES
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
        with self.experts.forward_pass() as routes_LTK:
            logits_BZV = run_model(self._model, input_BN, mask_BC, cache, last)
        return logits_BZV, torch.stack(routes_LTK, dim=1).to(self._route_dtype)
