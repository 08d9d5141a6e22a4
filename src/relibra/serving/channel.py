"""`Channel`: one end of a connection between two processes, for messages of msgspec and rows as they lie in memory.

Control frames go between the API server and its workers: a dictionary with one key, which says what is asked or
answered. Requests travel as the engine's `Sequence`, what a step adds to them as `Progress`; the API server reads with
asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack
from numpy import ndarray

from relibra.engine.sequence import FinishReason, Sequence
from relibra.errors import EngineError

MOST_BYTES = 256 << 20
"""Limit of one message: routes of a long answer are tens of MiB."""
ANYTHING: msgpack.Decoder[Any] = msgpack.Decoder()
UNIX = "unix:"
BACKLOG = 1024


class Channel:
    """An end of a connection: any thread sends, one thread receives.

    Its methods raise ConnectionError where the other end is gone, and TimeoutError where it takes longer than `limit`;
    both are OSErrors, after which a message may be cut: close the channel.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected socket."""
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(True)
        self._connection, self._sending = Connection(end.detach()), threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, to wait for several channels."""
        return self._connection.fileno()

    def limit(self, *, receive: float, send: float) -> None:
        """Set how many seconds a transfer may stand still; 0: any time."""
        with self._socket() as end:
            for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
                whole, rest = divmod(seconds, 1)
                end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(1e6 * rest)))

    def send(self, message: object, rows: memoryview | None = None) -> None:
        """Send a message, and the rows that it announces."""
        with self._sending, _connection_errors():
            self._connection.send_bytes(msgpack.encode(message))
            while rows:
                rows = rows[os.write(self.fileno(), rows) :]

    def receive(
        self, decoder: msgpack.Decoder[Any] = ANYTHING, *, most_bytes: int = MOST_BYTES, seconds: float | None = None
    ) -> Any:
        """Wait for a message; one above `most_bytes` is an OSError, and is not read.

        seconds   until it begins; None: as `limit` says
        raises    EngineError for anything that the decoder does not know
        """
        with _connection_errors():
            if seconds is not None and not self._connection.poll(seconds):
                raise TimeoutError
            data = self._connection.recv_bytes(most_bytes)
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"a message arrived that is not of a relibra worker of this version: {error}") from error

    def fill(self, rows: memoryview) -> None:
        """Receive the rows that a message has announced."""
        with _connection_errors():
            while rows:
                count = os.readv(self.fileno(), [rows])
                if count == 0:
                    raise EOFError
                rows = rows[count:]

    def send_file(self, file: int) -> None:
        """Hand a descriptor to the other process, which has to call `receive_file`."""
        send_handle(self._connection, file, 0)

    def receive_file(self) -> int:
        """Return a descriptor of the other process, to be closed here; raises RuntimeError where none was sent."""
        with _connection_errors():
            return recv_handle(self._connection)

    def shut_down(self) -> None:
        """End the connection, from any thread; both ends then find it closed when they receive."""
        with contextlib.suppress(OSError), self._socket() as end:
            end.shutdown(socket.SHUT_RDWR)

    def take_socket(self) -> socket.socket:
        """Close this end, and return a socket that takes over its connection."""
        taken = self._socket()
        self.close()
        return taken

    def close(self) -> None:
        """Close this end, once no message is being sent; again has no effect."""
        with self._sending:
            self._connection.close()

    def _socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.fileno()))


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise ConnectionError where the other end has closed, TimeoutError where a transfer stands still too long."""
    try:
        yield
    except EOFError as error:
        raise ConnectionResetError("the other end has closed the channel") from error
    except BlockingIOError as error:
        raise TimeoutError("timed out") from error


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and the address that others connect to.

    address   unix:PATH, or HOST:PORT, where port 0 lets the system choose
    """
    family, place = _family_and_place(address)
    listener = socket.socket(family)
    listener.bind(place)
    listener.listen(BACKLOG)
    if family != socket.AF_UNIX:
        address = "{}:{}".format(*listener.getsockname())
    return listener, address


def connect(address: str, timeout: float) -> Channel:
    """Return a channel to an expert worker, with a limit of `timeout` seconds; raises EngineError."""
    family, place = _family_and_place(address)
    end = socket.socket(family)
    end.settimeout(timeout)
    try:
        end.connect(place)
    except OSError as error:
        end.close()
        raise EngineError(
            f"no expert worker answers at {address}: {error.strerror or error}; look whether it is running"
        ) from error
    channel = Channel(end)
    channel.limit(receive=timeout, send=timeout)
    return channel


def worker_address(transport: str, folder: Path, name: str) -> str:
    """Return the address at which an expert worker of this machine listens."""
    return f"{UNIX}{folder}/experts-{name}" if transport != "tcp" else "127.0.0.1:0"


def _family_and_place(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if address.startswith(UNIX):
        return socket.AF_UNIX, address.removeprefix(UNIX)
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host, int(port))


_LENGTH = struct.Struct("!i")  # as connections of `multiprocessing` send it before each message


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token of a sequence, or its end.

    token              None: an end without a token
    top                most likely tokens with their log-probs
    routes             with the last token, if asked for: a .npy file of the experts `[m, L, K]` of every token fed
    prompt_log_probs   with the first token, if asked for: of all tokens of the prompt but the first
    error              sentence, where `finish` is "error" or "lost"
    """

    number: int
    token: int | None = None
    log_prob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    error: str = ""
    routes: bytes | None = None
    prompt_log_probs: tuple[float, ...] | None = None


def progress_of(sequence: Sequence) -> Progress:
    """Return what the latest step has added to a sequence."""
    if sequence.finish in ("cancelled", "lost", "error"):
        return Progress(number=sequence.number, finish=sequence.finish, error=sequence.error)
    routes = sequence.routes if sequence.finish else None
    scores = sequence.scores if len(sequence.tokens) == 1 else ()
    return Progress(
        number=sequence.number,
        token=sequence.tokens[-1],
        log_prob=sequence.log_probs[-1],
        top=tuple(sequence.top),
        finish=sequence.finish,
        routes=None if routes is None else _npy_file(routes),
        prompt_log_probs=tuple(score for piece in scores for score in piece.tolist()) if scores else None,
    )


def progress_frames(sequences: Iterable[Sequence]) -> list[list[Progress]]:
    """Return the progress of sequences by frame; one with routes is alone in its frame, as two may pass MOST_BYTES."""
    everyone = [progress_of(sequence) for sequence in sequences]
    short = [one for one in everyone if one.routes is None]
    return [*([short] if short else []), *([one] for one in everyone if one.routes is not None)]


def _npy_file(array: ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Wait for a frame; None: the worker is gone, or announces one above MOST_BYTES."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 <= length <= MOST_BYTES:
            return None
        return msgpack.decode(await reader.readexactly(length), type=dict[str, Any])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    """Queue a frame to a worker."""
    data = msgpack.encode(frame)
    writer.write(_LENGTH.pack(len(data)) + data)
