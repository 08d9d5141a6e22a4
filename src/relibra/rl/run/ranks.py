"""The ranks of a run: join the process group, exchange JSON, arrays and numbers, stop together."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from torch.distributed.rendezvous import rendezvous as open_store

from relibra.environment import STOP_SIGNALS
from relibra.errors import ConfigError, EngineError, LostPeerError

NO_DEADLINE = timedelta(days=20)  # in milliseconds it fits into 32 bits
MAX_ARRAY_BYTES = 4 << 30


@dataclass(frozen=True)
class Rendezvous:
    """The store at which ranks meet, and who this process is among them."""

    store: Any
    rank: int
    num_ranks: int


def connect_ranks(timeout_seconds: float, url: str = "env://", *, attempt: int = 0) -> Rendezvous:
    """Connect to the store at which the ranks meet; does not wait for them.

    url        as for `torch.distributed.init_process_group`: "tcp://HOST:PORT?rank=0&world_size=2", or the environment
    attempt    how often `torchrun` has started the ranks again: a store may remember earlier ones
    raises     ConfigError where another program has the port; LostPeerError where nobody answers in time
    """
    try:
        shared, rank, num_ranks = next(open_store(url, timeout=timedelta(seconds=timeout_seconds)))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                "the port of the process group (MASTER_PORT) is in use by another program: end it, or choose another "
                "port (torchrun --master-port)"
            ) from error
        raise _lost_peer(error, timeout_seconds) from error
    return Rendezvous(dist.PrefixStore(f"attempt-{attempt}", shared), rank, num_ranks)  # type: ignore[attr-defined]


@contextmanager
def joined_ranks(timeout_seconds: float, device: torch.device, rendezvous: Rendezvous | None = None) -> Iterator[None]:
    """Join the process group, and leave it at the end; collective.

    After an error the group is not left, because that would wait for peers that may have ended.

    rendezvous   None: of the environment, as under `torchrun`
    raises       LostPeerError if a peer ended or does not answer in time
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    met = rendezvous or connect_ranks(timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(backend, timeout=timeout, store=met.store, rank=met.rank, world_size=met.num_ranks)
        _STATE.group, _STATE.background = open_group(), open_group()
        yield
        wait_for_ranks()  # a peer may still need this rank
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
        raise _lost_peer(error, timeout_seconds) from error
    dist.destroy_process_group()
    _STATE.group = _STATE.background = None


def _lost_peer(error: RuntimeError, timeout_seconds: float) -> LostPeerError:
    return LostPeerError(
        f"a peer ended, or took longer than {timeout_seconds:g} s (parallel.timeout_seconds): "
        f"{str(error).splitlines()[0].partition('. ')[0]}"
    )


@dataclass
class _RankState:
    """What this rank does, and the groups whose collectives have no deadline: of training, and of its threads.

    since   when the stage began, or the last wait began or ended
    """

    group: dist.ProcessGroup | None = None
    background: dist.ProcessGroup | None = None
    stage: str = "start"
    since: float = field(default_factory=time.monotonic)
    waiting: bool = False


_STATE = _RankState()
_THREAD = threading.local()


def open_group() -> dist.ProcessGroup:
    """Return a new group of all ranks, whose collectives have no deadline; collective."""
    return dist.new_group(backend="gloo", timeout=NO_DEADLINE)


@contextmanager
def collectives_in(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, let the collectives of this thread run in a group of their own, beside those of training."""
    _THREAD.group = group
    try:
        yield
    finally:
        _THREAD.group = None


def thread_group() -> dist.ProcessGroup | None:
    """Return the group of this thread's collectives; None: the default one."""
    return getattr(_THREAD, "group", None)


def wait_for_ranks() -> None:
    """Wait until all ranks are here, without a deadline; collective.

    It stands behind work that may take longer on one rank than on others: rollout, rewards, writing. A peer that ends
    is noticed at once, one that gives no sign of life by `run/heartbeat.py`.
    """
    if (group := thread_group()) is not None:
        dist.barrier(group=group)
        return
    _STATE.waiting, _STATE.since = True, time.monotonic()
    dist.barrier(group=_STATE.group)
    _STATE.waiting, _STATE.since = False, time.monotonic()


def background_group() -> dist.ProcessGroup | None:
    """Return the group of collectives that run beside those of training, without a deadline; None: the default one."""
    return _STATE.background


def begin_stage(stage: str) -> None:
    """Remember what this rank does from now on, such as "reward of step 3", to tell its peers."""
    if thread_group() is None:  # what runs beside training is no stage of it
        _STATE.stage, _STATE.since = stage, time.monotonic()


def present_work() -> tuple[str, float, bool]:
    """Return what this rank does, for how many seconds, and whether it waits for its peers."""
    return _STATE.stage, time.monotonic() - _STATE.since, _STATE.waiting


def broadcast_json(value: Any) -> Any:
    """Return rank 0's value on every rank; collective."""
    return gather_json(value if dist.get_rank() == 0 else None)[0]


def broadcast_bytes(payload: bytes) -> bytes:
    """Return rank 0's bytes on every rank; collective. Memory of a rank does not grow with the number of ranks.

    raises    EngineError if they are more than MAX_ARRAY_BYTES
    """
    size = torch.tensor([len(payload)])
    dist.broadcast(size, src=0, group=thread_group())
    if size > MAX_ARRAY_BYTES:
        raise EngineError(f"rank 0 sends {int(size)} bytes: at most {MAX_ARRAY_BYTES} are allowed")
    sent = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0 and size:
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=thread_group())
    return sent.numpy().tobytes()


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order; collective.

    group     of all ranks; None: that of this thread
    raises    EngineError as `gather_several`
    """
    text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    return [json.loads(piece.tobytes()) for (piece,) in gather_several([text], group)]


def gather_arrays(array: ndarray) -> list[ndarray]:
    """Return the arrays of all ranks, in rank order; collective.

    array     of the same dtype and number of axes on all ranks; sizes may differ
    raises    EngineError if an array takes more than MAX_ARRAY_BYTES
    """
    return [one for (one,) in gather_several([array])]


def gather_several(arrays: Sequence[ndarray], group: dist.ProcessGroup | None = None) -> list[list[ndarray]]:
    """Return several arrays of all ranks, in rank order, in one exchange; collective.

    arrays    each of the same dtype and number of axes on all ranks; sizes may differ
    group     of all ranks; None: that of this thread
    raises    EngineError if the arrays of a rank take more than MAX_ARRAY_BYTES
    """
    group = group or thread_group()
    joined = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    flat = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.zeros(0, dtype=torch.uint8)
    sizes = torch.tensor([len(flat), *(size for array in arrays for size in array.shape)])
    sizes_of = [torch.zeros_like(sizes) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes_of, sizes, group=group)
    largest = max(int(other[0]) for other in sizes_of)
    if largest > MAX_ARRAY_BYTES:
        raise EngineError(f"a rank sends {largest} bytes: at most {MAX_ARRAY_BYTES} are allowed")
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: len(flat)] = flat
    gathered = [torch.empty_like(padded) for _ in sizes_of]
    dist.all_gather(gathered, padded, group=group)
    return [
        _split_arrays(piece.numpy().tobytes(), other[1:].tolist(), arrays)
        for piece, other in zip(gathered, sizes_of, strict=True)
    ]


def _split_arrays(joined: bytes, sizes: Sequence[int], like: Sequence[ndarray]) -> list[ndarray]:
    """Split concatenated bytes into arrays of the dtypes and numbers of axes of `like`."""
    found, start, axis = [], 0, 0
    for array in like:
        shape = sizes[axis : axis + array.ndim]
        count = math.prod(shape)
        found.append(np.frombuffer(joined, dtype=array.dtype, count=count, offset=start).reshape(shape))
        start, axis = start + count * array.itemsize, axis + array.ndim
    return found


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a CPU tensor over all ranks; collective."""
    total = values.clone()
    dist.all_reduce(total, group=thread_group())
    return total


def largest_over_ranks(value: int) -> int:
    """Return the largest value of any rank; collective."""
    largest = torch.tensor([value])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=thread_group())
    return int(largest)


class StopRequest:
    """Records SIGINT (Ctrl-C) and SIGTERM (of schedulers), so that all ranks stop together after a whole step."""

    def __init__(self) -> None:
        self._requested = False
        self.on_request: Callable[[], None] = lambda: None
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def on_any_rank(self) -> bool:
        """Return whether any rank was asked to stop; collective."""
        return largest_over_ranks(int(self._requested)) > 0

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        self._requested = True
        self.on_request()


_TRANSPORT = ("gloo/transport", "connection closed by peer", "connection reset by peer", "broken pipe", "timed out")


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error comes from a lost connection, which torch raises under many names."""
    if isinstance(error, EngineError) or not isinstance(error, RuntimeError):  # ours, already explained
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _TRANSPORT)
