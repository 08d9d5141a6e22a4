"""Messages between the API server and its workers: MessagePack frames over connections of `multiprocessing`.

A frame is a dictionary with one key, which says what is asked or answered. Requests travel as `Generate`, what a step
adds to them as `Progress`.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack
from numpy import ndarray

from relibra.engine.sequence import FinishReason, SamplingParameters, Sequence
from relibra.errors import EngineError

MAX_FRAME = 256 << 20
"""Bytes of the largest frame that is read: routes of a long answer are tens of MiB."""
_LENGTH = struct.Struct("!i")  # as connections of `multiprocessing` send it before each message


class Generate(msgspec.Struct, frozen=True):
    """A request; `number` is unique within a worker."""

    number: int
    tokens: tuple[int, ...]
    sampling: SamplingParameters

    def sequence(self) -> Sequence:
        """Return it as the engine takes it."""
        return Sequence(number=self.number, prompt=self.tokens, sampling=self.sampling)


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


def _npy_file(array: ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


class ControlChannel:
    """An end of a connection, for threads."""

    def __init__(self, connection: Connection) -> None:
        """Use an open connection."""
        self._connection, self._sending = connection, threading.Lock()

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame; may be called by several threads."""
        with self._sending:
            self._connection.send_bytes(msgpack.encode(frame))

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Wait for a frame; None: the other end is gone. Raises TimeoutError after so many seconds."""
        try:
            if not self._connection.poll(seconds):
                raise TimeoutError
            return msgpack.decode(self._connection.recv_bytes(MAX_FRAME), type=dict[str, Any])
        except (EOFError, ConnectionResetError):
            return None

    def take_socket(self) -> socket.socket:
        """Close this end, and return a socket that takes over its connection."""
        taken = socket.socket(fileno=os.dup(self._connection.fileno()))
        self.close()
        return taken

    def close(self) -> None:
        """Close this end; again has no effect."""
        self._connection.close()


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Wait for a frame; None: the worker is gone. Raises EngineError for one above MAX_FRAME."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 <= length <= MAX_FRAME:
            raise EngineError(f"a control frame of {length} bytes is larger than {MAX_FRAME}")
        return msgpack.decode(await reader.readexactly(length), type=dict[str, Any])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    """Queue a frame to a worker."""
    data = msgpack.encode(frame)
    writer.write(_LENGTH.pack(len(data)) + data)
