"""The side of attention: send rows to the expert workers that need them, and wait for what they return."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32
from numpy import ndarray
from torch import Tensor

from relibra.errors import EngineError
from relibra.serving.channel import UNIX, Channel, connect
from relibra.serving.exchange.addressing import Addressed
from relibra.serving.exchange.messages import (
    ANSWER,
    MOST_BYTES,
    ExchangeCounters,
    Failure,
    Hello,
    Rows,
    bytes_of,
    make_buffers,
    shared_file,
)
from relibra.serving.layout import ExpertsOf


@dataclass(frozen=True, kw_only=True)
class ExchangeShape:
    """Sizes that all channels of an attention worker share.

    experts_of     experts of each expert worker in each layer, ascending
    max_tokens     most tokens of one exchange
    """

    experts_of: ExpertsOf
    max_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Most rows of one exchange, to all workers together."""
        return self.max_tokens * min(self.top_k, len(self.experts_of))

    def choices(self, worker: int) -> int:
        """Return the most choices of one message to a worker: a token goes to each expert once."""
        return self.max_tokens * min(self.top_k, max(map(len, self.experts_of[worker])))


class WorkerLostError(EngineError):
    """Expert workers that failed to answer an exchange; its results are not complete."""


class SlotExchange:
    """Exchange of one micro-batch with all expert workers; `slot` is the number of the micro-batch.

    One exchange is under way at a time: `rows`, `dispatch`, `collect`, layer after layer. So a worker never holds more
    than one message of a slot, and its memory is bounded.

    lost   the error of each worker that is gone; it gets no more messages
    """

    def __init__(
        self,
        addresses: Sequence[str],
        shape: ExchangeShape,
        *,
        attention: int,
        slot: int,
        secret: bytes,
        timeout: float,
    ) -> None:
        """Open a channel to each worker and allocate the buffers.

        attention, slot   numbers of this worker and of its micro-batch
        timeout           seconds to wait for a worker, in each exchange
        raises            EngineError if a worker does not answer, or refuses
        """
        self.shape, self.attention, self.slot = shape, attention, slot
        self._addresses, self._secret, self._timeout = list(addresses), secret, timeout
        self.counters = ExchangeCounters()
        self.lost: dict[int, EngineError] = {}
        self._channels: dict[int, Channel] = {}
        self._sent_N = [0] * len(addresses)
        self._shared, self._file = addresses[0].startswith(UNIX), -1
        self._make_buffers()
        try:
            for worker in range(len(addresses)):
                self._open(worker)
        except BaseException:
            self.close()
            raise

    def rows(self, count: int) -> Float[Tensor, "Y H"]:
        """Return the buffer of the next exchange's rows, ordered by worker: write them there before `dispatch`."""
        return self._rows_XH[:count]

    def dispatch(self, layer: int, addressed: Addressed, gate_C: Float32[ndarray, " C"]) -> None:
        """Send each worker its rows, and the experts and gates of each; return before anyone has computed.

        gate_C   weights in the order of `addressed.choice_C`
        """
        self.counters.calls += 1
        first = choice = 0
        row_C = addressed.row_C.astype("<u4", copy=False)
        for worker, layers in enumerate(self.shape.experts_of):
            count = self._sent_N[worker] = int(addressed.rows_N[worker])
            counts = addressed.counts_NE[worker, list(layers[layer])].astype("<u4")
            own, sent_YH = slice(choice, choice + int(counts.sum())), self._rows_XH[first : first + count]
            if not count:
                self.counters.empty_messages += 1
            elif worker not in self.lost:
                rows = Rows(
                    layer=layer,
                    first_row=first,
                    count=count,
                    counts=counts.tobytes(),
                    rows=row_C[own].tobytes(),
                    gates=gate_C[own].astype("<f4", copy=False).tobytes(),
                )
                with self._noting_loss(worker, layer):
                    self._channels[worker].send(rows, None if self._shared else bytes_of(sent_YH))
                self.counters.rows += count
                self.counters.bytes += sent_YH.nbytes + len(rows.rows) + len(rows.gates)
            first, choice = first + count, own.stop

    def collect(self, layer: int) -> Float[Tensor, "Y H"]:
        """Wait for all workers; return the results in the order of the rows. The next `dispatch` overwrites them.

        raises   WorkerLostError if a worker with rows has failed, is gone, or takes longer than the timeout; the
                 answers of all others have been taken in, so that the exchange can be repeated without it
        """
        first, missing = 0, []
        for worker, count in enumerate(self._sent_N):
            if count and worker not in self.lost:
                with self._noting_loss(worker, layer):
                    self._await_answer(worker)
                    if not self._shared:
                        self._channels[worker].fill(bytes_of(self._results_XH[first : first + count]))
            if worker in self.lost and count:
                missing.append(self.lost[worker])
            first += count
        if self._shared and any(isinstance(error.__cause__, TimeoutError) for error in missing):
            self._renew_buffers()
        if missing:
            raise WorkerLostError(str(missing[0]))
        return self._results_XH[:first]

    def rejoin(self, worker: int, address: str, experts: tuple[tuple[int, ...], ...]) -> None:
        """Open a channel to a worker that was started again, or holds other experts; raises EngineError."""
        experts_of = list(self.shape.experts_of)
        experts_of[worker] = experts
        self.shape = replace(self.shape, experts_of=tuple(experts_of))
        self._addresses[worker] = address
        self._open(worker)

    def close(self) -> None:
        """Close all channels; again has no effect."""
        for channel in self._channels.values():
            channel.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _make_buffers(self) -> None:
        size = (self.shape.rows, self.shape.hidden, self.shape.dtype)
        self._close_file()
        if self._shared:
            self._file = shared_file(*size)  # stays open: channels that are opened later send it
        self._rows_XH, self._results_XH = make_buffers(*size, self._file if self._shared else None)
        self.counters.buffers += 2

    def _renew_buffers(self) -> None:
        """Replace shared buffers, with new channels: a worker that only hangs may still write into the old ones."""
        self._make_buffers()
        for worker in self._channels.keys() - self.lost.keys():
            with suppress(EngineError):
                self._open(worker)

    def _open(self, worker: int) -> None:
        """Open a channel to a worker, in place of a former one; where that fails the worker is lost: EngineError."""
        shape = self.shape
        hello = Hello(
            secret=self._secret,
            attention=self.attention,
            slot=self.slot,
            sizes=(worker, shape.experts_of[worker], shape.hidden, str(shape.dtype)),
            capacity=shape.max_tokens,
            choices=shape.choices(worker),
            shared_rows=shape.rows if self._shared else 0,
        )
        if worker in self._channels:
            self._channels[worker].close()
        self.lost.pop(worker, None)
        with self._noting_loss(worker):
            channel = self._channels[worker] = connect(self._addresses[worker], self._timeout)
            channel.send(hello)
            if self._shared:
                channel.send_file(self._file)
            self._await_answer(worker)
        if worker in self.lost:
            raise self.lost[worker]
        self.counters.open_channel()

    def _await_answer(self, worker: int) -> None:
        answer = self._channels[worker].receive(ANSWER, most_bytes=MOST_BYTES)
        if isinstance(answer, Failure):
            raise EngineError(f"expert worker {worker}: {answer.sentence}")

    @contextmanager
    def _noting_loss(self, worker: int, layer: int | None = None) -> Iterator[None]:
        """Note a worker as lost where its channel fails inside, with a sentence that names both ends."""
        try:
            yield
            return
        except EngineError as error:
            self.lost[worker] = error
        except OSError as error:
            where = "its welcome" if layer is None else f"layer {layer} of micro-batch {self.slot}"
            late = isinstance(error, TimeoutError)
            reason = f"did not answer within {self._timeout:g} s" if late else f"is gone ({error.strerror or error})"
            self.lost[worker] = EngineError(
                f"attention worker {self.attention} waited for expert worker {worker} at {where}: it {reason}; "
                "look at what that worker printed; relibra serve restarts workers that end or stay silent"
            )
            self.lost[worker].__cause__ = error
        if worker in self._channels:
            self._channels[worker].close()
