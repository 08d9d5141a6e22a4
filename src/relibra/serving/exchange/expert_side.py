"""The side of experts: accept channels, take in messages in the order in which they are complete, answer them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt32
from numpy import ndarray
from torch import Tensor

from relibra.errors import EngineError
from relibra.serving.exchange.addresses import UNIX
from relibra.serving.exchange.buffers import RowBuffer, mapped_buffers, private_buffer
from relibra.serving.exchange.counters import ExchangeCounters
from relibra.serving.exchange.group_channel import EXPERTS, Backend, GroupChannel
from relibra.serving.exchange.messages import (
    GREETING_BYTES,
    HEADER_BYTES,
    Greeting,
    Header,
    Kind,
    read_greeting,
    read_header,
    send_error,
)

GREETING_SECONDS = 5.0
"""How long a connection may take to say who it is."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """What an expert worker holds.

    num_experts   experts of each layer in this worker
    max_rows      most rows that a channel may ask memory for
    backend       of the process groups that rows come through; None: they do not
    device        of the experts
    timeout       seconds that rows may take after their header, through a process group
    """

    worker: int
    num_experts: int
    num_layers: int
    hidden: int
    dtype: torch.dtype
    max_rows: int
    backend: Backend | None = None
    device: str = "cpu"
    timeout: float = 60.0


class _Channel:
    """Connection of one micro-batch of one attention worker, and the state of the message that is arriving."""

    def __init__(self, connection: socket.socket, greeting: Greeting, buffers: tuple[RowBuffer, RowBuffer]) -> None:
        self.connection, self.greeting = connection, greeting
        self.rows, self.results = buffers
        self.group: GroupChannel | None = None
        self.waiter: ThreadPoolExecutor | None = None  # for rows that come through a group of gloo
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
            elsewhere = self.greeting.shared_rows > 0 or self.group is not None
            rows = memoryview(b"") if elsewhere else self.rows.bytes_of(0, self.header.num_rows)
            self._view, self._done = rows, 0

    def join(self, shape: ExpertShape) -> None:
        """Make the process group of the channel, together with its other end.

        raises   ConnectionError, TimeoutError when that does not come
        """
        assert shape.backend is not None, "greetings with a group are accepted with a backend only"
        address, number = f"{UNIX}{self.connection.getsockname()}", self.greeting.group_number
        device, timeout = torch.device(shape.device), shape.timeout
        self.group = GroupChannel(shape.backend, address, number, rank=EXPERTS, device=device, timeout=timeout)
        if not self.group.in_stream_order:
            self.waiter = ThreadPoolExecutor(1, thread_name_prefix="rows")

    def close(self) -> None:
        """Close the socket, and the group of rows."""
        self.connection.close()
        if self.group is not None:
            self.group.close()
        if self.waiter is not None:
            self.waiter.shutdown(wait=False)

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

    def __init__(self, channel: _Channel, header: Header) -> None:
        """Refer to the rows of a message that is complete."""
        self._channel, self._header = channel, header
        self.receive: Any = None  # under way in the streams of a GPU
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

    def await_rows(self) -> None:
        """Let what is computed next wait for the rows, where the device waits for them and not the host."""
        if self.receive is not None and self._channel.group is not None:
            self._channel.group.finish(self.receive)

    def answer(self, result_YH: Float[Tensor, "Y H"], counters: ExchangeCounters) -> None:
        """Send results; where they lie in `result_YH` of this message, they are not copied."""
        channel, header = self._channel, self._header
        counters.calls += 1
        if header.num_rows and not channel.results.holds(result_YH, self._first):
            counters.staging_copies += 1
            self.result_YH.copy_(result_YH)
        counters.send(header.num_rows, channel.results.row_bytes)
        with contextlib.suppress(OSError):  # a sender that is gone is noticed where its next message is awaited
            channel.connection.sendall(header._replace(kind=Kind.RESULTS).packed())
            if channel.group is not None and header.num_rows:
                channel.group.send(self.result_YH)
            elif not channel.greeting.shared_rows and header.num_rows:
                channel.connection.sendall(channel.results.bytes_of(0, header.num_rows))

    def refuse(self, sentence: str) -> None:
        """Send an error instead of results."""
        with contextlib.suppress(OSError):
            send_error(self._channel.connection, self._header, sentence)


class ExpertInbox:
    """Messages of all attention workers.

    With shared memory the thread that computes reads the headers itself. Otherwise another thread takes rows in
    while it computes, so that no sender waits, and no circle of full sockets can close.
    """

    def __init__(self, listener: socket.socket, shape: ExpertShape, secret: bytes, counters: ExchangeCounters) -> None:
        """Accept channels at a listening socket, from those who know the secret."""
        self._listener, self._shape, self._secret, self._counters = listener, shape, secret, counters
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ready: deque[Message] = deque()
        self._arrived = threading.Condition()
        self._closed, self._ending, self._open = False, False, 0
        self._reader: threading.Thread | None = None
        if listener.family != socket.AF_UNIX or shape.backend is not None:
            self._reader = threading.Thread(target=self._read_forever, name="rows", daemon=True)
            self._reader.start()

    @property
    def counters(self) -> ExchangeCounters:
        """Counts since the start."""
        return self._counters

    def next(self, timeout: float | None = None) -> Message | None:
        """Return the message that was complete first; None: none within `timeout` seconds, or the inbox is closed."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ready and not self._closed:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            if self._reader is None:
                self._poll(left)
            else:
                with self._arrived:
                    self._arrived.wait_for(lambda: self._ready or self._closed, left)
        if not self._ready:
            return None
        message = self._ready.popleft()
        message.await_rows()
        return message

    def close(self) -> None:
        """Close all channels; `next` returns None. May be called by any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        with self._arrived:
            self._arrived.notify_all()

    def close_when_left(self) -> None:
        """Close as soon as no channel is open any more, those that were never opened included."""
        self._ending = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def release(self) -> None:
        """Give back all sockets, when no thread uses the inbox any more; again has no effect."""
        if self._selector.get_map() is None:
            return
        self.close()
        if self._reader is not None:
            self._reader.join()
        for key in list(self._selector.get_map().values()):
            (key.data or key.fileobj).close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()

    def _read_forever(self) -> None:
        while not self._closed:
            self._poll(None)

    def _poll(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(1)
            else:
                self._receive(key.data)
        if self._ending and not self._open:
            self.close()

    def _receive(self, channel: _Channel) -> None:
        try:
            if not channel.receive():
                return
        except (OSError, EngineError):
            self._selector.unregister(channel.connection)
            channel.close()
            self._open -= 1
            return
        message = channel.take()
        if channel.group is None or not len(message.rows_YH):
            self._put(message)
            return
        try:
            receive = channel.group.start_receive(message.rows_YH)
        except OSError:
            return  # the end of the socket follows
        if channel.waiter is not None:
            channel.waiter.submit(self._put_arrived, channel, message, receive)
        else:
            message.receive = receive
            self._put(message)

    def _put_arrived(self, channel: _Channel, message: Message, receive: Any) -> None:
        """Wait for rows that come through a group, in a thread of the channel."""
        assert channel.group is not None
        try:
            channel.group.finish(receive)
        except OSError:
            with contextlib.suppress(OSError):
                channel.connection.shutdown(socket.SHUT_RDWR)  # half a message: the channel ends
            return
        self._put(message)

    def _put(self, message: Message) -> None:
        with self._arrived:
            self._ready.append(message)
            self._arrived.notify()

    def _accept(self) -> None:
        """Welcome a connection that knows the secret and has our sizes; close any other."""
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(GREETING_SECONDS)
            greeting, buffers = self._greeted(connection)
        except (OSError, EngineError, ValueError) as error:
            with contextlib.suppress(OSError):
                send_error(connection, Header(Kind.ERROR, 0, 0, 0, 0), f"refused: {error}")
            connection.close()
            return
        channel = _Channel(connection, greeting, buffers)
        try:
            connection.sendall(Header(Kind.WELCOME, 0, 0, 0, 0).packed())
            if greeting.group_number:
                channel.join(self._shape)
            connection.settimeout(None)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has left already
            channel.close()
            return
        self._counters.open_channel(buffers=2)
        self._open += 1
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def _greeted(self, connection: socket.socket) -> tuple[Greeting, tuple[RowBuffer, RowBuffer]]:
        """Read and check a greeting, and make the buffers of the channel."""
        data, files = bytearray(), []
        while len(data) < GREETING_BYTES:
            if connection.family == socket.AF_UNIX:
                piece, received, _, _ = socket.recv_fds(connection, GREETING_BYTES - len(data), 1)
                files += received
            else:
                piece = connection.recv(GREETING_BYTES - len(data))
            if not piece:
                raise ConnectionResetError("closed")
            data += piece
        greeting, shape = read_greeting(data), self._shape
        if greeting.secret != self._secret:
            raise EngineError("the secret is that of another deployment")
        own = (shape.worker, shape.num_experts, shape.num_layers, shape.hidden, shape.dtype)
        theirs = (greeting.expert, greeting.num_experts, greeting.num_layers, greeting.hidden, greeting.dtype)
        if own != theirs:
            names = "worker, experts, layers, hidden size, dtype"
            raise EngineError(f"the two ends were started for different models ({names}: {theirs} instead of {own})")
        if (greeting.group_number > 0) != (shape.backend is not None):
            raise EngineError("the two ends were started for different transports")
        if max(greeting.capacity, greeting.shared_rows) > shape.max_rows or greeting.capacity < 1:
            raise EngineError(f"a channel of {greeting.capacity} rows is more than the {shape.max_rows} allowed")
        if greeting.shared_rows:
            if len(files) != 1:
                raise EngineError("the shared memory was not sent")
            return greeting, mapped_buffers(files[0], greeting.shared_rows, shape.hidden, shape.dtype)
        size = (greeting.capacity, shape.hidden, shape.dtype, shape.device)
        return greeting, (private_buffer(*size), private_buffer(*size))
