"""Frames between the front and its workers: a length, then JSON, over a socket pair that the front made.

Routes travel as base64 inside; everything else is numbers and short texts.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import Any

from relibra.errors import EngineError

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20
"""Bytes of the largest frame that is read: routes of a long answer are tens of MiB."""


class ControlSocket:
    """The worker's end."""

    def __init__(self, connection: socket.socket) -> None:
        """Use a connected socket."""
        self._connection, self._sending = connection, threading.Lock()

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame; may be called by several threads."""
        with self._sending:
            self._connection.sendall(_packed(frame))

    def receive(self) -> dict[str, Any] | None:
        """Wait for a frame; None: the other end is gone."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        data = self._exactly(_length(head))
        return None if data is None else json.loads(data)

    def _exactly(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self._connection.recv(min(count - len(data), 1 << 20))
            except ConnectionResetError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Wait for a frame; None: the worker is gone."""
    try:
        length = _length(await reader.readexactly(_LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    """Queue a frame to a worker."""
    writer.write(_packed(frame))


def _packed(frame: dict[str, Any]) -> bytes:
    data = json.dumps(frame, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


def _length(head: bytes) -> int:
    """Return the length that begins a frame; raises EngineError above MAX_FRAME."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise EngineError(f"a control frame of {length} bytes is larger than {MAX_FRAME}")
    return int(length)
