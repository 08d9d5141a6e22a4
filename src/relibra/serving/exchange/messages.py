"""What both sides of the exchange have: its messages, buffers of rows, and counters.

`Hello` opens a channel, each `Rows` is a layer of a micro-batch; both are answered. The sizes in a message are compared
with those of the channel before rows are read into memory; a message of another size ends the channel.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import msgpack
from torch import Tensor

VERSION: Literal[5] = 5
MOST_BYTES = 1 << 18
"""Limit of a message without its rows and choices: some bytes per expert."""
CHOICE_BYTES = 8
"""Of a choice in a message: its row and its gate."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


Sizes = tuple[int, tuple[tuple[int, ...], ...], int, str]
"""What the ends of a channel agree on: number of the worker, its experts in each layer, hidden size, dtype."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a channel: who opens it, and the sizes that both ends must agree on.

    attention, slot     numbers of the attention worker and of its micro-batch
    sizes               `ExpertShape.sizes` of the expert worker that is meant
    capacity            most rows of one message
    choices             most choices of one message
    shared_rows         rows of the slot's buffers in shared memory, whose file comes next; 0: no shared memory
    """

    secret: bytes
    attention: Count
    slot: Count
    sizes: Sizes
    capacity: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    choices: Count
    shared_rows: Count
    version: Literal[5] = VERSION


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a layer, which follow, or lie in shared memory.

    layer      MoE layer, from 0 in the order of layers
    first_row  row of the slot's buffer at which they lie, in shared memory
    count      rows, one per token
    counts     choices of each expert that the worker holds in this layer, 4 bytes each, little-endian
    rows       row of each choice, by expert, 4 bytes each
    gates      weight of each choice in the sum of its row, float32
    """

    layer: Count
    first_row: Count
    count: Count
    counts: bytes
    rows: bytes
    gates: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer: the channel is open, or the results follow, or lie in shared memory."""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Answer: it was not done, for the reason of the sentence."""

    sentence: str


HELLO, ROWS, ANSWER = msgpack.Decoder(Hello), msgpack.Decoder(Rows), msgpack.Decoder(Done | Failure)
"""What `Channel.receive` takes."""


def shared_file(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the descriptor of a file in memory for two buffers, which both ends map with `make_buffers`.

    The file has no name, so nothing is left behind by a process that is killed.
    """
    file = os.memfd_create("relibra-rows", os.MFD_CLOEXEC)
    os.ftruncate(file, 2 * rows * hidden * dtype.itemsize)
    return file


def make_buffers(rows: int, hidden: int, dtype: torch.dtype, file: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the buffers `[X, H]` of rows and of results.

    file     of both, whose descriptor is not needed afterwards; None: memory of this process
    raises   ValueError when the file has another size
    """
    if file is None:
        both = torch.zeros((2, rows, hidden), dtype=dtype)
    else:
        size = 2 * rows * hidden * dtype.itemsize
        if os.fstat(file).st_size != size:
            raise ValueError(f"the shared memory has {os.fstat(file).st_size} bytes instead of {size}")
        both = torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(2, rows, hidden)
    return both[0], both[1]


def bytes_of(rows_YH: Tensor) -> memoryview:
    """Return the bytes of rows that lie together, to be sent or filled."""
    return rows_YH.view(torch.uint8).numpy().data.cast("B") if len(rows_YH) else memoryview(b"")


@dataclass
class ExchangeCounters:
    """Counts of one side since it started.

    calls             dispatches of a layer of a micro-batch, or answers to one
    rows              sent
    bytes             of these rows, and of the choices and gates with them
    empty_messages    those without rows, which are not sent
    buffers           allocated
    group_creations   channels opened after the first call
    """

    calls: int = 0
    rows: int = 0
    bytes: int = 0
    empty_messages: int = 0
    buffers: int = 0
    group_creations: int = 0

    def open_channel(self, buffers: int = 0) -> None:
        """Count a channel's buffers, and the channel itself if it opens after the first call: calls wait for that."""
        self.buffers += buffers
        self.group_creations += self.calls > 0
