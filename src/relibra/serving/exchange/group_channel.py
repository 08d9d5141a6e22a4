"""`GroupChannel`: rows of one channel through a process group of its two ends: NCCL between GPUs, gloo between CPUs.

Headers go over the channel's socket before their rows, so each end knows the size of its next receive. The group is
made with the channel. With NCCL, sends and receives are only put into streams.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from relibra.errors import in_a_line
from relibra.serving.exchange.addresses import UNIX

Backend = Literal["gloo", "nccl"]
HOST = "127.0.0.1"
"""All workers are processes of one machine."""
ATTENTION_RANK, EXPERTS_RANK = 0, 1
"""Ranks of the two ends."""
OPENING_SECONDS = 5.0
"""How long one end waits for the other to make the group: an expert worker takes in nothing else meanwhile."""


def new_group_number() -> int:
    """Return a random number, so that groups do not meet in one file."""
    return secrets.randbits(31) + 1


class GroupChannel:
    """One end of a channel. Rows of one message at a time are under way in each direction.

    device_waits   rows are waited for by the stream of a GPU, not by the host
    """

    def __init__(
        self, backend: Backend, address: str, number: int, *, rank: int, device: torch.device, timeout: float
    ) -> None:
        """Make the group; the other end does the same. They meet in a file beside the socket of the expert worker.

        address   of the expert worker, unix:PATH
        number    of the group
        rank      ATTENTION_RANK or EXPERTS_RANK
        timeout   seconds that rows may take; NCCL ends the process after them
        raises    ConnectionError; TimeoutError when the other end does not come within `opening_seconds(timeout)`
        """
        self.device_waits = backend == "nccl"
        self._peer = 1 - rank
        self._sending: Any = None
        self._calls = threading.Lock()  # NCCL takes one call of a communicator at a time
        self._timeout = timedelta(seconds=timeout)
        self._receive_stream = torch.cuda.Stream(device) if self.device_waits else None
        path = f"{address.removeprefix(UNIX)}.{number}"
        self._group: Any = _connect_within(opening_seconds(timeout), backend, path, rank, device, self._timeout)

    def send(self, rows_YH: Tensor) -> None:
        """Begin to send rows. Do not change them until the other end has answered.

        raises   ConnectionError, TimeoutError when the previous rows were not taken in time, or the other end is gone
        """
        with _as_channel_errors(), self._calls:
            group, before = self._open_group(), self._sending  # another thread may close the channel
            if before is not None and not self.device_waits:
                before.wait(self._timeout)
            self._sending = group.send([rows_YH], self._peer, 0)

    def start_receive(self, rows_YH: Tensor) -> Any:
        """Begin to receive as many rows as a header has announced; `finish` waits for them."""
        with _as_channel_errors(), self._calls, self._on_receive_stream():
            return self._open_group().recv([rows_YH], self._peer, 0)

    def finish(self, receive: Any) -> None:
        """Wait for rows; with NCCL let the stream of this thread wait.

        raises   ConnectionError, TimeoutError when they do not come
        """
        with _as_channel_errors():
            if self.device_waits:
                receive.wait()
            else:
                receive.wait(self._timeout)

    def close(self) -> None:
        """Give up the group. Never waits: what is under way may be waiting for an end that hangs."""
        held = [self._group, self._sending]
        self._group = self._sending = None
        _drop(held)

    def _open_group(self) -> Any:
        if self._group is None:
            raise ConnectionResetError("the channel is closed")
        return self._group

    def _on_receive_stream(self) -> AbstractContextManager[object]:
        """Put the receive into a stream of its own, or it would wait for the experts of earlier messages."""
        return nullcontext() if self._receive_stream is None else torch.cuda.stream(self._receive_stream)


def opening_seconds(timeout: float) -> float:
    """Return how long making a group may take."""
    return min(timeout, OPENING_SECONDS)


def _connect_within(
    seconds: float, backend: Backend, path: str, rank: int, device: torch.device, timeout: timedelta
) -> Any:
    """Return the group of the two ends, in a thread: NCCL makes its communicator without a limit of its own.

    raises   ConnectionError, TimeoutError
    """
    made: Future[Any] = Future()

    def connect() -> None:
        try:
            made.set_result(_connect(backend, path, rank, device, timeout))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: who waits raises it
            made.set_exception(error)

    threading.Thread(target=connect, name="make group", daemon=True).start()
    try:
        return made.result(seconds)
    except TimeoutError:
        made.add_done_callback(_drop_late)
        raise TimeoutError(f"no process group with the other end within {seconds:g} s") from None


def _drop_late(made: Future[Any]) -> None:
    if made.exception() is None:
        _drop([made.result()])


def _connect(backend: Backend, path: str, rank: int, device: torch.device, timeout: timedelta) -> Any:
    """Make a group, and exchange a number each way: the first message makes the communicator of NCCL."""
    limit, number = timedelta(seconds=OPENING_SECONDS), torch.zeros(1, device=device)
    with _as_channel_errors():
        held = [_make_group(backend, path, rank, timeout)]
        try:
            for sender in (ATTENTION_RANK, EXPERTS_RANK):
                begin = held[0].send if rank == sender else held[0].recv
                begin([number], 1 - rank, 0).wait(limit)
        except RuntimeError:
            _drop(held)
            raise
        return held[0]


def _drop(held: list[Any]) -> None:
    """Give up a group, the first of the list, and what belongs to it, in a thread: that may wait for the other end."""

    def drop() -> None:
        if isinstance(held[0], dist.ProcessGroupNCCL if dist.is_nccl_available() else ()):
            held[0].abort()  # ends kernels that wait for the other end
        held.clear()

    threading.Thread(target=drop, name="close group", daemon=True).start()


def _make_group(backend: Backend, path: str, rank: int, timeout: timedelta) -> Any:
    options: Any
    store = FileStore(path, 2)
    store.set_timeout(timedelta(seconds=OPENING_SECONDS))
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
        late = any(words in str(error).lower() for words in ("timed out", "timeout"))
        # Without its traceback, which would keep the group of a channel that is given up.
        raise (TimeoutError if late else ConnectionResetError)(in_a_line(error)) from error.with_traceback(None)
