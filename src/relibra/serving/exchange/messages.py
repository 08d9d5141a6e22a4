"""Messages of the exchange: `Hello` opens a channel, each `Rows` is a layer of a micro-batch; both are answered.

The sizes in a message are compared with those of the channel before rows are read into memory; a message of another
size ends the channel.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import msgpack

VERSION: Literal[4] = 4
MOST_BYTES = 1 << 18
"""Of a message without its rows: four per expert, and some."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a channel: who opens it, and the sizes that both ends must agree on.

    attention, slot     numbers of the attention worker and of its micro-batch
    sizes               `ExpertShape.sizes` of the expert worker that is meant
    capacity            most rows of one message
    shared_rows         rows of the slot's buffers in shared memory, whose file comes next; 0: no shared memory
    """

    secret: bytes
    attention: Count
    slot: Count
    sizes: tuple[int, int, int, int, str]
    capacity: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    shared_rows: Count
    version: Literal[4] = VERSION


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a layer, which follow, or lie in shared memory.

    layer      MoE layer, from 0 in the order of layers
    first_row  row of the slot's buffer at which they lie, in shared memory
    counts     rows of each expert of the worker, 4 bytes each, little-endian
    """

    layer: Count
    first_row: Count
    counts: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer: the channel is open, or the results follow, or lie in shared memory."""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Answer: it was not done, for the reason of the sentence."""

    sentence: str


HELLO, ROWS, ANSWER = msgpack.Decoder(Hello), msgpack.Decoder(Rows), msgpack.Decoder(Done | Failure)
"""What `Channel.receive` takes."""
