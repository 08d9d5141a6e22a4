"""Messages of the exchange: a greeting per channel, then headers of a fixed size, each before its rows.

A greeting is MessagePack; numbers of headers are little-endian. The sizes in a message are compared with those of the
channel before anything is read into memory; a message of another size ends the channel.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Literal, NamedTuple

import msgspec

from relibra.errors import EngineError

VERSION: Literal[3] = 3
SECRET_BYTES = 16
GREETING_BYTES = 512
_HEADER = struct.Struct("<BxHIII")
HEADER_BYTES = _HEADER.size
MAX_TEXT = 2000
"""Bytes of the sentence of an error."""


class Kind(IntEnum):
    """What a header announces."""

    ROWS = 1
    RESULTS = 2
    ERROR = 3
    WELCOME = 4


class Header(NamedTuple):
    """The fixed part of a message.

    layer      MoE layer, from 0 in the order of layers
    first_row  row of the slot's buffer at which the rows lie, in shared memory
    num_rows   rows of the message; of ERROR: bytes of its text
    sequence   number of the exchange on this channel; an answer repeats it
    """

    kind: Kind
    layer: int
    first_row: int
    num_rows: int
    sequence: int

    def packed(self) -> bytes:
        """Return the bytes to send."""
        return _HEADER.pack(*self)


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """Return the header at the beginning of some bytes; raises EngineError for an unknown kind."""
    kind, *others = _HEADER.unpack_from(data)
    if kind not in set(Kind):
        raise EngineError(f"a message of kind {kind} arrived, which does not exist: the other end is no relibra worker")
    return Header(Kind(kind), *others)


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a channel: who opens it, and the sizes that both ends must agree on.

    attention, expert   numbers of the two workers
    slot                micro-batch of the attention worker
    capacity            most rows of one message
    shared_rows         rows of the slot's buffers in shared memory, whose file comes along; 0: no shared memory
    dtype               of the rows, as torch names it
    """

    secret: bytes
    attention: int
    expert: int
    slot: int
    capacity: int
    shared_rows: int
    hidden: int
    dtype: str
    num_experts: int
    num_layers: int
    version: Literal[3] = VERSION

    def packed(self) -> bytes:
        """Return the bytes to send: always as many."""
        data = msgspec.msgpack.encode(self)
        return (len(data).to_bytes(2, "little") + data).ljust(GREETING_BYTES, b"\0")


def read_greeting(data: bytes | bytearray) -> Greeting:
    """Return a greeting; raises EngineError for anything else."""
    try:
        return msgspec.msgpack.decode(data[2 : 2 + int.from_bytes(data[:2], "little")], type=Greeting)
    except msgspec.DecodeError as error:
        raise EngineError("a channel was opened by something that is no relibra worker of this version") from error


def receive_into(channel: socket.socket, view: memoryview) -> None:
    """Fill a view from a channel.

    raises   TimeoutError, or ConnectionError when the other end is gone
    """
    done = 0
    while done < len(view):
        count = channel.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError("the other end has closed the channel")
        done += count


def send_error(channel: socket.socket, header: Header, sentence: str) -> None:
    """Answer a message with an error."""
    text = sentence.encode()[:MAX_TEXT]
    channel.sendall(Header(Kind.ERROR, header.layer, 0, len(text), header.sequence).packed() + text)


def read_error(channel: socket.socket, header: Header) -> str:
    """Return the sentence of an ERROR whose header has been read."""
    text = bytearray(min(header.num_rows, MAX_TEXT))
    receive_into(channel, memoryview(text))
    return text.decode(errors="replace")
