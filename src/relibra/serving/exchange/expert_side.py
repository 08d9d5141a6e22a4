"""The side of experts: accept channels, take in messages, first come first served, and answer them."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt32
from numpy import ndarray
from torch import Tensor

from relibra.errors import EngineError
from relibra.serving.channel import Channel
from relibra.serving.exchange.messages import (
    CHOICE_BYTES,
    HELLO,
    MOST_BYTES,
    ROWS,
    Done,
    ExchangeCounters,
    Failure,
    Hello,
    Sizes,
    bytes_of,
    make_buffers,
)

GREETING_SECONDS = 5.0
"""How long a connection may take to say who it is."""
_MOST_GREETINGS = 64
"""Connections that may be greeting at the same time."""
LONGEST_SENTENCE = 2000


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """What an expert worker holds.

    experts    of each layer, ascending
    max_rows   most rows that a channel may ask memory for, and most choices of a message
    timeout    seconds that a transfer may stand still; without shared memory, a receive may take any time
    """

    worker: int
    experts: tuple[tuple[int, ...], ...]
    hidden: int
    dtype: torch.dtype
    max_rows: int
    timeout: float = 60.0

    @property
    def sizes(self) -> Sizes:
        """Return what the two ends of a channel have to agree on."""
        return self.worker, self.experts, self.hidden, str(self.dtype)


@dataclass(frozen=True, eq=False)
class SlotChannel:
    """Connection of one micro-batch of one attention worker, and its buffers."""

    channel: Channel
    hello: Hello
    rows_XH: Tensor
    results_XH: Tensor

    def receive(self) -> Message:
        """Wait for the next message; raises OSError when the other end is gone, EngineError where it does not fit."""
        hello, experts = self.hello, self.hello.sizes[1]
        found = self.channel.receive(ROWS, most_bytes=MOST_BYTES + CHOICE_BYTES * hello.choices)
        if found.layer >= len(experts) or len(found.counts) != 4 * len(experts[found.layer]):
            raise EngineError(f"layer {found.layer} with {len(found.counts)} bytes of counts does not fit its channel")
        counts_E, choices = np.frombuffer(found.counts, "<u4"), len(found.rows) // 4
        if choices > hello.choices or int(counts_E.sum(dtype=np.uint64)) != choices:
            raise EngineError(f"{choices} choices do not fit their counts or a channel of at most {hello.choices}")
        if not len(found.rows) == len(found.gates) == 4 * choices:
            raise EngineError(f"{choices} choices have {len(found.rows)} bytes of rows and {len(found.gates)} of gates")
        row_C, gate_C = np.frombuffer(found.rows, "<u4").astype(np.int64), np.frombuffer(found.gates, "<f4").copy()
        count, first = found.count, found.first_row if hello.shared_rows else 0
        if count > hello.capacity or first + count > len(self.rows_XH) or row_C.max(initial=-1) >= count:
            raise EngineError(f"{count} rows from {first} do not fit a channel of at most {hello.capacity} rows")
        place = slice(first, first + count)
        if not hello.shared_rows:
            self.channel.fill(bytes_of(self.rows_XH[place]))
        choices_C = torch.from_numpy(row_C), torch.from_numpy(gate_C)
        return Message(self, found.layer, counts_E, *choices_C, self.rows_XH[place], self.results_XH[place])


@dataclass(frozen=True, eq=False)
class Message:
    """Rows of one layer of one micro-batch.

    counts_E   choices of each expert of this worker
    row_C      row of each choice, by expert; gate_C: its weight
    rows_YH    tokens, in the memory in which they arrived
    result_YH  where their weighted sums belong
    """

    slot: SlotChannel
    layer: int
    counts_E: UInt32[ndarray, " E"]
    row_C: Int64[Tensor, " C"]
    gate_C: Float32[Tensor, " C"]
    rows_YH: Float[Tensor, "Y H"]
    result_YH: Float[Tensor, "Y H"]

    @property
    def micro_batch(self) -> int:
        """Number of the micro-batch at its attention worker."""
        return self.slot.hello.slot

    @property
    def sender(self) -> str:
        """Who sent it."""
        return f"attention worker {self.slot.hello.attention}, micro-batch {self.micro_batch}"

    def answer(self, counters: ExchangeCounters) -> None:
        """Send what was written into `result_YH`."""
        counters.calls += 1
        counters.rows += len(self.result_YH)
        counters.bytes += self.result_YH.nbytes
        self._reply(Done(), None if self.slot.hello.shared_rows else bytes_of(self.result_YH))

    def fail(self, sentence: str) -> None:
        """Send an error instead of results."""
        self._reply(Failure(sentence[:LONGEST_SENTENCE]))

    def _reply(self, answer: Done | Failure, rows: memoryview | None = None) -> None:
        try:
            self.slot.channel.send(answer, rows)
        except OSError:  # the sender is gone, or does not read; the thread that receives from it closes the channel
            self.slot.channel.shut_down()


class ExpertInbox:
    """Messages of all attention workers.

    With shared memory the computing thread reads messages itself. Otherwise each channel has a thread that takes rows
    in, so that full sockets cannot wait for one another in a circle.
    """

    def __init__(self, listener: socket.socket, shape: ExpertShape, secret: bytes) -> None:
        """Accept channels at a listening socket, from those who know the secret."""
        self._listener, self._shape, self._secret = listener, shape, secret
        self.counters = ExchangeCounters()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, partial(self._woken.recv, 1 << 10))
        self._ready: deque[Message] = deque()
        self._slots: set[SlotChannel] = set()
        self._greeting, self._arrived = set[Channel](), deque[SlotChannel]()
        self._closed = self._ending = False

    def next(self, timeout: float | None = None) -> Message | None:
        """Return the message that was complete first; None: none within `timeout` seconds, or the inbox is closed."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ready and not self._closed:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            for key, _ in self._selector.select(left):
                key.data()
            while self._arrived:
                self._open(self._arrived.popleft())
            # A channel moves from `_greeting` to `_arrived` to `_slots`: looked at in this order, none is missed.
            if self._ending and not self._greeting and not self._arrived and not self._slots:
                self._closed = True
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Let `next` return None. May be called by any thread."""
        self._closed = True
        self._wake_up()

    def close_when_left(self) -> None:
        """Close once no channel is open; at once if none ever was."""
        self._ending = True
        self._wake_up()

    def release(self) -> None:
        """Give back all sockets, when no thread uses the inbox any more; again has no effect."""
        for channel in list(self._greeting):
            channel.shut_down()
        for slot in [*self._slots, *self._arrived]:
            slot.channel.shut_down()
            if slot.hello.shared_rows:
                slot.channel.close()  # others are closed by their threads
        self._selector.close()
        for end in (self._listener, self._wake, self._woken):
            end.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _take(self, slot: SlotChannel) -> bool:
        """Queue the next message of a channel; return False where there is none any more, and close the channel."""
        try:
            self._ready.append(slot.receive())
            return True
        except (OSError, EngineError):
            if slot.hello.shared_rows:
                self._selector.unregister(slot.channel)
            slot.channel.close()
            self._slots.discard(slot)
            return False

    def _take_all(self, slot: SlotChannel) -> None:
        """Queue the messages of a channel until it ends: the thread of a channel without shared memory."""
        while self._take(slot):
            self._wake_up()
        self._wake_up()

    def _accept(self) -> None:
        """Greet a connection in a thread of its own: it may be silent until its time is over."""
        channel = Channel(self._listener.accept()[0])
        if len(self._greeting) >= _MOST_GREETINGS:
            channel.close()
            return
        self._greeting.add(channel)
        threading.Thread(target=self._welcome, args=(channel,), name="greeting", daemon=True).start()

    def _welcome(self, channel: Channel) -> None:
        """Welcome a connection that knows the secret and has our sizes; refuse any other."""
        try:
            channel.limit(receive=GREETING_SECONDS, send=GREETING_SECONDS)
            slot = self._greeted(channel)
            channel.send(Done())
            self._arrived.append(slot)
        except (OSError, EngineError, ValueError, RuntimeError, MemoryError) as error:
            with contextlib.suppress(OSError):
                channel.send(Failure(f"refused: {error}"[:LONGEST_SENTENCE]))
            channel.close()
        self._greeting.discard(channel)
        self._wake_up()

    def _open(self, slot: SlotChannel) -> None:
        """Take messages from a channel."""
        shared, timeout = slot.hello.shared_rows > 0, self._shape.timeout
        slot.channel.limit(receive=timeout if shared else 0.0, send=timeout)
        self.counters.open_channel(buffers=2)
        self._slots.add(slot)
        if shared:
            self._selector.register(slot.channel, selectors.EVENT_READ, partial(self._take, slot))
        else:
            threading.Thread(target=self._take_all, args=(slot,), name="reader", daemon=True).start()

    def _greeted(self, channel: Channel) -> SlotChannel:
        """Read and check a greeting, and make the buffers of the channel."""
        hello, shape = channel.receive(HELLO, most_bytes=MOST_BYTES), self._shape
        file = channel.receive_file() if hello.shared_rows else None
        try:
            if hello.secret != self._secret:
                raise EngineError("the secret is that of another deployment")
            if hello.sizes != shape.sizes:
                names = ("worker", "experts", "hidden size", "dtype")
                unlike = [name for name, got, own in zip(names, hello.sizes, shape.sizes, strict=True) if got != own]
                raise EngineError(f"the two ends were started for different models: they differ in {', '.join(unlike)}")
            if (most := max(hello.capacity, hello.choices, hello.shared_rows)) > shape.max_rows:
                raise EngineError(f"a channel of {most} rows or choices is more than the {shape.max_rows} allowed")
            rows = hello.shared_rows or hello.capacity
            return SlotChannel(channel, hello, *make_buffers(rows, shape.hidden, shape.dtype, file))
        finally:
            if file is not None:
                os.close(file)
