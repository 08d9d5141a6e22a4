"""The side of experts: accept channels, take in messages, first come first served, and answer them."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque

from relibra.errors import EngineError
from relibra.serving.exchange.buffers import RowBuffer, mapped_buffers, private_buffer
from relibra.serving.exchange.counters import ExchangeCounters
from relibra.serving.exchange.expert_channel import ExpertChannel, ExpertShape, Message
from relibra.serving.exchange.messages import (
    GREETING_BYTES,
    Greeting,
    Header,
    Kind,
    read_greeting,
    send_error,
)

GREETING_SECONDS = 5.0
"""How long a connection may take to say who it is."""


class ExpertInbox:
    """Messages of all attention workers.

    With shared memory the computing thread reads headers itself. Otherwise a reader thread takes rows in, so that full
    sockets cannot wait for one another in a circle.
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
        self._failure: Exception | None = None
        self._reader: threading.Thread | None = None
        if listener.family != socket.AF_UNIX:
            self._reader = threading.Thread(target=self._read_forever, name="reader", daemon=True)
            self._reader.start()

    @property
    def counters(self) -> ExchangeCounters:
        """Counts since the start."""
        return self._counters

    def next(self, timeout: float | None = None) -> Message | None:
        """Return the message that was complete first; None: none within `timeout` seconds, or the inbox is closed.

        raises   what has ended the thread that reads
        """
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
        if self._failure is not None:
            raise self._failure
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Close all channels; `next` returns None. May be called by any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        with self._arrived:
            self._arrived.notify_all()

    def close_when_left(self) -> None:
        """Close once no channel is open; at once if none ever was."""
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
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()

    def _read_forever(self) -> None:
        try:
            while not self._closed:
                self._poll(None)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: `next` raises it
            self._failure = error
            self.close()

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

    def _receive(self, channel: ExpertChannel) -> None:
        try:
            if not channel.receive():
                return
        except (OSError, EngineError):
            self._selector.unregister(channel.connection)
            channel.connection.close()
            self._open -= 1
            return
        with self._arrived:
            self._ready.append(channel.take())
            self._arrived.notify()

    def _accept(self) -> None:
        """Welcome a connection that knows the secret and has our sizes; close any other."""
        connection, _ = self._listener.accept()
        try:
            connection.settimeout(GREETING_SECONDS)
            greeting, buffers = self._greeted(connection)
        except (OSError, EngineError, ValueError, RuntimeError, MemoryError) as error:
            with contextlib.suppress(OSError):
                send_error(connection, Header(Kind.ERROR, 0, 0, 0, 0), f"refused: {error}")
            connection.close()
            return
        try:
            connection.sendall(Header(Kind.WELCOME, 0, 0, 0, 0).packed())
            connection.settimeout(None)
            seconds, rest = divmod(self._shape.timeout, 1)  # a limit for sends only: reads here never wait
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6))
            )
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # it has left
            connection.close()
            return
        self._counters.open_channel(buffers=2)
        self._open += 1
        self._selector.register(connection, selectors.EVENT_READ, ExpertChannel(connection, greeting, buffers))

    def _greeted(self, connection: socket.socket) -> tuple[Greeting, tuple[RowBuffer, RowBuffer]]:
        """Read and check a greeting, and make the buffers of the channel."""
        files: list[int] = []
        try:
            greeting = read_greeting(_receive_greeting(connection, files))
            return greeting, self._buffers_for(greeting, files)
        finally:
            for file in files:
                os.close(file)

    def _buffers_for(self, greeting: Greeting, files: list[int]) -> tuple[RowBuffer, RowBuffer]:
        """Check a greeting and the files that came with it, and make the buffers of the channel."""
        shape = self._shape
        if greeting.secret != self._secret:
            raise EngineError("the secret is that of another deployment")
        own = (shape.worker, shape.num_experts, shape.num_layers, shape.hidden, str(shape.dtype))
        theirs = (greeting.expert, greeting.num_experts, greeting.num_layers, greeting.hidden, greeting.dtype)
        if own != theirs:
            names = "worker, experts, layers, hidden size, dtype"
            raise EngineError(f"the two ends were started for different models ({names}: {theirs} instead of {own})")
        if max(greeting.capacity, greeting.shared_rows) > shape.max_rows or greeting.capacity < 1:
            raise EngineError(f"a channel of {greeting.capacity} rows is more than the {shape.max_rows} allowed")
        if greeting.shared_rows:
            if len(files) != 1:
                raise EngineError("the shared memory was not sent")
            return mapped_buffers(files[0], greeting.shared_rows, shape.hidden, shape.dtype)
        size = (greeting.capacity, shape.hidden, shape.dtype)
        return private_buffer(*size), private_buffer(*size)


def _receive_greeting(connection: socket.socket, files: list[int]) -> bytes:
    """Return the bytes of a greeting; descriptors that come with it are added to `files`, whatever happens."""
    data = bytearray()
    while len(data) < GREETING_BYTES:
        if connection.family == socket.AF_UNIX:
            piece, received, _, _ = socket.recv_fds(connection, GREETING_BYTES - len(data), 1)
            files += received
        else:
            piece = connection.recv(GREETING_BYTES - len(data))
        if not piece:
            raise ConnectionResetError("closed")
        data += piece
    return bytes(data)
