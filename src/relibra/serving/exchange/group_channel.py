"""`GroupChannel`: rows of one channel through a process group of its two ends: NCCL between GPUs, gloo between CPUs.

Headers still go over the socket of the channel, each before its rows, so that every receive has the size that its
header says. A channel has one group, made when it is opened: channels do not wait for one another, and no call makes a
group. On a GPU nothing here waits for the device: receives, experts and sends follow one another in its streams.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from relibra.errors import in_a_line
from relibra.serving.exchange.addresses import UNIX

Backend = Literal["gloo", "nccl"]
HOST = "127.0.0.1"
"""All workers are processes of one machine."""
ATTENTION, EXPERTS = 0, 1
"""Ranks of the two ends."""
OPENING_SECONDS = 5.0
"""How long one end waits for the other to make the group: an expert worker takes in nothing meanwhile."""


def new_group_number() -> int:
    """Return a number that no other group of this deployment has."""
    return secrets.randbits(31) + 1


class GroupChannel:
    """One end of a channel. Rows of one message at a time are under way in each direction.

    in_stream_order   a receive is waited for by the device, not by the host
    """

    def __init__(
        self, backend: Backend, address: str, number: int, *, rank: int, device: torch.device, timeout: float
    ) -> None:
        """Make the group; the other end does the same. They meet in a file beside the socket of the expert worker.

        address   of the expert worker, unix:PATH
        number    of the group
        rank      ATTENTION or EXPERTS
        timeout   seconds that rows may take
        raises    ConnectionError, TimeoutError when the other end does not come
        """
        self.in_stream_order = backend == "nccl"
        self._peer = 1 - rank
        self._group: Any = None
        self._sending: Any = None
        self._calls = threading.Lock()  # NCCL takes one call of a communicator at a time
        self._timeout = timedelta(seconds=timeout)
        self._beside = torch.cuda.Stream(device) if self.in_stream_order else None
        with _as_channel_errors():
            store = FileStore(f"{address.removeprefix(UNIX)}.{number}", 2)
            store.set_timeout(timedelta(seconds=OPENING_SECONDS))
            self._group = _make_group(backend, store, rank, self._timeout)
            self._meet(rank, device)

    def send(self, rows_YH: Tensor) -> None:
        """Begin to send rows; they stay as they are until the other end has answered.

        raises   ConnectionError, TimeoutError when the other end has not taken the rows before, or is gone
        """
        with _as_channel_errors(), self._calls:
            if self._sending is not None and not self.in_stream_order:
                self._sending.wait(self._timeout)
            self._sending = self._open_group().send([rows_YH], self._peer, 0)

    def start_receive(self, rows_YH: Tensor) -> Any:
        """Begin to receive as many rows as a header has announced; `finish` waits for them."""
        with _as_channel_errors(), self._calls, self._beside_computing():
            return self._open_group().recv([rows_YH], self._peer, 0)

    def finish(self, receive: Any) -> None:
        """Wait for rows; with NCCL let the stream of this thread wait.

        raises   ConnectionError, TimeoutError when they do not come
        """
        with _as_channel_errors():
            if self.in_stream_order:
                receive.wait()
            else:
                receive.wait(self._timeout)

    def close(self) -> None:
        """Give up the group. Never waits: what is under way may be waiting for an end that hangs."""
        held = [self._group, self._sending]
        self._group = self._sending = None

        def drop() -> None:
            if self.in_stream_order and held[0] is not None:
                held[0].abort()  # ends kernels that wait for the other end
            held.clear()

        threading.Thread(target=drop, name="close group").start()

    def _meet(self, rank: int, device: torch.device) -> None:
        """Exchange a number each way: the first message makes the communicator of NCCL, so no call waits for that."""
        limit, number = timedelta(seconds=OPENING_SECONDS), torch.zeros(1, device=device)
        for sender in (ATTENTION, EXPERTS):
            begin = self._group.send if rank == sender else self._group.recv
            begin([number], self._peer, 0).wait(limit)

    def _open_group(self) -> Any:
        if self._group is None:
            raise ConnectionResetError("the channel is closed")
        return self._group

    def _beside_computing(self) -> AbstractContextManager[object]:
        """Let a receive begin at once: NCCL lets it wait for what the current stream does."""
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)


def _make_group(backend: Backend, store: Store, rank: int, timeout: timedelta) -> Any:
    options: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = min(timeout, timedelta(seconds=OPENING_SECONDS))
    return dist.ProcessGroupGloo(store, rank, 2, options)


@contextmanager
def _as_channel_errors() -> Iterator[None]:
    """Raise what a socket would raise: torch has one type for a peer that is gone and for one that is late."""
    try:
        yield
    except RuntimeError as error:
        text = in_a_line(error)
        if "imed out" in text or "imeout" in text:
            raise TimeoutError(text) from error
        raise ConnectionResetError(text) from error
