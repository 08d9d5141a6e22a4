"""The end of a channel at an expert worker, and the messages that arrive there."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt32
from numpy import ndarray
from torch import Tensor

from relibra.errors import EngineError
from relibra.serving.exchange.buffers import RowBuffer
from relibra.serving.exchange.counters import ExchangeCounters
from relibra.serving.exchange.messages import HEADER_BYTES, Greeting, Header, Kind, read_header, send_error


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """What an expert worker holds.

    num_experts   experts of each layer in this worker
    max_rows      most rows that a channel may ask memory for
    timeout       seconds that a send may take
    """

    worker: int
    num_experts: int
    num_layers: int
    hidden: int
    dtype: torch.dtype
    max_rows: int
    timeout: float = 60.0


class ExpertChannel:
    """Connection of one micro-batch of one attention worker, and the state of the message that is arriving."""

    def __init__(self, connection: socket.socket, greeting: Greeting, buffers: tuple[RowBuffer, RowBuffer]) -> None:
        self.connection, self.greeting = connection, greeting
        self.rows, self.results = buffers
        self.head = bytearray(HEADER_BYTES + 4 * greeting.num_experts)
        self.header: Header | None = None
        self._view, self._done = memoryview(self.head), 0

    def receive(self) -> bool:
        """Take in what has arrived; return whether a message is complete.

        raises   ConnectionError when the other end is gone, EngineError for a message that does not fit
        """
        while True:
            while self._done < len(self._view):
                try:
                    count = self.connection.recv_into(self._view[self._done :], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                if count == 0:
                    raise ConnectionResetError("closed")
                self._done += count
            if self.header is not None:
                return True
            self.header = self._checked_header()
            rows = memoryview(b"") if self.greeting.shared_rows else self.rows.bytes_of(0, self.header.num_rows)
            self._view, self._done = rows, 0

    def give_up(self) -> None:
        """End the connection, from any thread: the thread that reads closes the channel then."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def take(self) -> Message:
        """Return the complete message, and wait for the next header."""
        assert self.header is not None, "the message is complete"
        message = Message(self, self.header)
        self.header, self._view, self._done = None, memoryview(self.head), 0
        return message

    def _checked_header(self) -> Header:
        header = read_header(self.head)
        counts = np.frombuffer(self.head, "<u4", offset=HEADER_BYTES)
        own = self.greeting
        fits = header.num_rows <= own.capacity and int(counts.sum(dtype=np.uint64)) == header.num_rows
        if own.shared_rows:
            fits &= header.first_row + header.num_rows <= own.shared_rows
        if header.kind is not Kind.ROWS or header.layer >= own.num_layers or not fits:
            raise EngineError(f"{header} does not fit a channel of at most {own.capacity} rows: it is closed")
        return header


class Message:
    """Rows of one layer of one micro-batch.

    layer      MoE layer
    rows_YH    ordered by expert, in the memory in which they arrived
    counts_E   rows of each expert of this worker
    result_YH  where the results belong
    """

    def __init__(self, channel: ExpertChannel, header: Header) -> None:
        """Refer to the rows of a message that is complete."""
        self._channel, self._header = channel, header
        self._first = header.first_row if channel.greeting.shared_rows else 0
        rows = slice(self._first, self._first + header.num_rows)
        self.layer = header.layer
        self.rows_YH: Float[Tensor, "Y H"] = channel.rows.rows_XH[rows]
        self.result_YH: Float[Tensor, "Y H"] = channel.results.rows_XH[rows]
        self.counts_E: UInt32[ndarray, " E"] = np.frombuffer(bytes(channel.head[HEADER_BYTES:]), "<u4")

    @property
    def micro_batch(self) -> int:
        """Its number at the attention worker."""
        return self._channel.greeting.slot

    @property
    def sender(self) -> str:
        """Who sent it."""
        return f"attention worker {self._channel.greeting.attention}, micro-batch {self._channel.greeting.slot}"

    def answer(self, result_YH: Float[Tensor, "Y H"], counters: ExchangeCounters) -> None:
        """Send results; where they lie in `result_YH` of this message, they are not copied."""
        channel, header = self._channel, self._header
        counters.calls += 1
        if header.num_rows and not channel.results.holds(result_YH, self._first):
            counters.staging_copies += 1
            self.result_YH.copy_(result_YH)
        counters.send(header.num_rows, channel.results.row_bytes)
        try:
            channel.connection.sendall(header._replace(kind=Kind.RESULTS).packed())
            if not channel.greeting.shared_rows and header.num_rows:
                channel.connection.sendall(channel.results.bytes_of(0, header.num_rows))
        except OSError:  # the sender is gone, or does not read
            channel.give_up()

    def fail(self, sentence: str) -> None:
        """Send an error instead of results."""
        try:
            send_error(self._channel.connection, self._header, sentence)
        except OSError:  # as in `answer`
            self._channel.give_up()
