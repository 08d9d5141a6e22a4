"""The side of attention: send rows to the expert workers that need them, and wait for what they return."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor

from relibra.errors import EngineError
from relibra.serving.exchange.addresses import UNIX, connect
from relibra.serving.exchange.buffers import RowBuffer, mapped_buffers, private_buffer, shared_file
from relibra.serving.exchange.counters import ExchangeCounters
from relibra.serving.exchange.messages import (
    HEADER_BYTES,
    SECRET_BYTES,
    Greeting,
    Header,
    Kind,
    read_error,
    read_header,
    receive_into,
)


@dataclass(frozen=True, kw_only=True)
class ExchangeShape:
    """Sizes that all channels of an attention worker share.

    experts_of     experts of each expert worker, ascending
    max_tokens     most tokens of one exchange
    top_k          experts that a token chooses
    num_layers     MoE layers
    """

    experts_of: tuple[tuple[int, ...], ...]
    max_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    num_layers: int

    @property
    def rows(self) -> int:
        """Most rows of one exchange, to all workers together."""
        return self.max_tokens * self.top_k

    def capacity(self, worker: int) -> int:
        """Return the most rows of one message to a worker: a token goes to each expert once."""
        return self.max_tokens * min(self.top_k, len(self.experts_of[worker]))


@dataclass(eq=False)
class _Channel:
    """A connection to one expert worker, for one slot."""

    worker: int
    socket: socket.socket
    header: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))


class WorkerLostError(EngineError):
    """Expert workers that failed to answer an exchange; its results are not complete."""


class SlotExchange:
    """Exchange of one micro-batch with all expert workers; `slot` is the number of the micro-batch.

    One exchange is under way at a time: `rows`, `dispatch`, `collect`, layer after layer. So a worker never holds more
    than one message of a slot, and its memory is bounded.

    lost   why each worker that is gone is gone; it gets no messages any more
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
        assert len(secret) == SECRET_BYTES
        self._secret = secret
        self.shape, self.attention, self.slot, self.timeout = shape, attention, slot, timeout
        self.counters = ExchangeCounters()
        self._addresses, self._shared = list(addresses), addresses[0].startswith(UNIX)
        self._file: int | None = None  # of shared memory, for channels that are opened later
        self._rows, self._results = self._make_buffers()
        self.lost: dict[int, EngineError] = {}
        self._channels: list[_Channel] = []
        self._sequence, self._sent_N = 0, [0] * len(addresses)
        try:
            for worker, address in enumerate(addresses):
                self._channels.append(_Channel(worker, connect(address, timeout)))
                self._greet(self._channels[-1], secret)
                self.counters.open_channel(buffers=2 * (worker == 0))
        except BaseException:
            self.close()
            raise

    def rows(self, count: int) -> Float[Tensor, "Y H"]:
        """Return the place of the next exchange's rows; write them there."""
        return self._rows.rows_XH[:count]

    def dispatch(self, layer: int, rows_YH: Float[Tensor, "Y H"], counts_P: Int64[ndarray, " P"]) -> None:
        """Send each worker its rows, or a notice that there are none. Returns before anyone has computed.

        rows_YH    ordered by place; where they lie in `rows`, they are not copied
        counts_P   rows of each place: the experts of worker 0, then those of worker 1, and so on
        """
        self._sequence += 1
        counters, row_bytes = self.counters, self._rows.row_bytes
        counters.calls += 1
        if len(rows_YH) and not self._rows.holds(rows_YH, 0):
            counters.staging_copies += 1
            self._rows.rows_XH[: len(rows_YH)].copy_(rows_YH)
        first, place = 0, 0
        counts = np.ascontiguousarray(counts_P, dtype="<u4")
        for channel in self._channels:
            own = counts[place : place + len(self.shape.experts_of[channel.worker])]
            count = int(own.sum())
            header = Header(Kind.ROWS, layer, first, count, self._sequence).packed() + own.tobytes()
            self._sent_N[channel.worker] = count
            if channel.worker not in self.lost:
                with self._noting_loss(channel), self._waiting_for(channel, self._at(layer)):
                    channel.socket.sendall(header)
                    if not self._shared and count:
                        channel.socket.sendall(self._rows.bytes_of(first, count))
                counters.send(count, row_bytes)
            first, place = first + count, place + len(own)

    def collect(self, layer: int) -> Float[Tensor, "Y H"]:
        """Wait for all workers; return the results in the order of the rows. The next `dispatch` overwrites them.

        raises   WorkerLostError if a worker with rows has failed, is gone, or takes longer than the timeout; the
                 answers of all others have been taken in, so that the exchange can be repeated without it
        """
        first, missing = 0, []
        for channel in self._channels:
            count = self._sent_N[channel.worker]
            if channel.worker not in self.lost:
                with self._noting_loss(channel), self._waiting_for(channel, self._at(layer)):
                    self._receive(channel, Header(Kind.RESULTS, layer, first, count, self._sequence))
            if channel.worker in self.lost and count:
                missing.append(self.lost[channel.worker])
            first += count
        if any(isinstance(error.__cause__, TimeoutError) for error in missing):
            self._renew_buffers()
        if missing:
            raise WorkerLostError(str(missing[0]))
        return self._results.rows_XH[:first]

    def _receive(self, channel: _Channel, expected: Header) -> None:
        """Take in an answer."""
        receive_into(channel.socket, memoryview(channel.header))
        header = read_header(channel.header)
        if header.kind is Kind.ERROR:
            raise EngineError(f"expert worker {channel.worker}: {read_error(channel.socket, header)}")
        if header != expected:
            raise EngineError(
                f"expert worker {channel.worker} answered {header} instead of {expected}: the two ends disagree"
            )
        if not self._shared and expected.num_rows:
            receive_into(channel.socket, self._results.bytes_of(expected.first_row, expected.num_rows))

    def rejoin(self, worker: int, address: str, experts: Sequence[int]) -> None:
        """Open a channel to a worker that was started again, or holds other experts; not during an exchange.

        raises   EngineError if it does not answer
        """
        experts_of = list(self.shape.experts_of)
        experts_of[worker] = tuple(experts)
        self.shape = replace(self.shape, experts_of=tuple(experts_of))
        self._addresses[worker] = address
        self._reopen(worker)
        self.lost.pop(worker, None)

    def _reopen(self, worker: int) -> None:
        """Open a channel in the place of another; where that fails the worker is lost, and the error is raised."""
        self._channels[worker].socket.close()
        try:
            self._channels[worker] = _Channel(worker, connect(self._addresses[worker], self.timeout))
            self._greet(self._channels[worker], self._secret)
        except EngineError as error:
            self._channels[worker].socket.close()
            self.lost[worker] = error
            raise
        self.counters.open_channel(buffers=0)

    def _renew_buffers(self) -> None:
        """Replace shared buffers, with new channels: a worker that only hangs may still write into the old ones."""
        if not self._shared:
            return
        self._rows, self._results = self._make_buffers()
        self.counters.buffers += 2
        for channel in list(self._channels):
            if channel.worker not in self.lost:
                with self._noting_loss(channel):
                    self._reopen(channel.worker)

    @contextmanager
    def _noting_loss(self, channel: _Channel) -> Iterator[None]:
        """Note a worker as lost where its channel fails."""
        try:
            yield
        except EngineError as error:
            channel.socket.close()
            self.lost[channel.worker] = error

    def close(self) -> None:
        """Close all channels; again has no effect."""
        for channel in self._channels:
            channel.socket.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _make_buffers(self) -> tuple[RowBuffer, RowBuffer]:
        shape = self.shape
        if self._shared:
            self._close_file()
            self._file = shared_file(shape.rows, shape.hidden, shape.dtype)
            return mapped_buffers(self._file, shape.rows, shape.hidden, shape.dtype)
        size = (shape.rows, shape.hidden, shape.dtype)
        return tuple(private_buffer(*size) for _ in range(2))  # type: ignore[return-value]

    def _greet(self, channel: _Channel, secret: bytes) -> None:
        """Tell a worker the sizes, and hand it the shared memory; wait for its welcome."""
        shape = self.shape
        greeting = Greeting(
            secret=secret,
            attention=self.attention,
            expert=channel.worker,
            slot=self.slot,
            capacity=shape.capacity(channel.worker),
            shared_rows=shape.rows if self._shared else 0,
            hidden=shape.hidden,
            dtype=str(shape.dtype),
            num_experts=len(shape.experts_of[channel.worker]),
            num_layers=shape.num_layers,
        )
        with self._waiting_for(channel, "its welcome"):
            if self._file is not None:
                socket.send_fds(channel.socket, [greeting.packed()], [self._file])
            else:
                channel.socket.sendall(greeting.packed())
            receive_into(channel.socket, memoryview(channel.header))
            header = read_header(channel.header)
            if header.kind is Kind.ERROR:
                raise EngineError(f"expert worker {channel.worker}: {read_error(channel.socket, header)}")

    def _at(self, layer: int) -> str:
        return f"layer {layer} of micro-batch {self.slot}"

    @contextmanager
    def _waiting_for(self, channel: _Channel, where: str) -> Iterator[None]:
        """Name both ends in errors of a channel."""
        try:
            yield
        except OSError as error:
            reason = f"it is gone ({error.strerror or error})"
            if isinstance(error, TimeoutError):
                reason = f"it did not answer within {self.timeout:g} s"
            raise EngineError(
                f"attention worker {self.attention} waited for expert worker {channel.worker} at {where}: {reason}; "
                "look at what that worker printed; relibra serve restarts workers that end or stay silent"
            ) from error
