"""The ranks of a run: joining them, and the few exchanges the trainer needs; payloads are JSON or numbers."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray

from relibra.errors import EngineError

MAX_PAYLOAD_BYTES = 64 << 20
MAX_ARRAY_BYTES = 4 << 30


class LostPeerError(EngineError):
    """A peer ended, or did not answer in time."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one machine meet.

    listener   on rank 0: a socket that has been listening on the port since before any rank started
    """

    rank: int
    num_ranks: int
    port: int
    listener: socket.socket | None

    def store(self, timeout: timedelta) -> Any:
        """Connect to the store that rank 0 serves; collective."""
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            self.port,
            self.num_ranks,
            is_master=self.listener is not None,
            timeout=timeout,
            master_listen_fd=self.listener.detach() if self.listener else None,
        )


@contextmanager
def joined_ranks(timeout_seconds: float, device: torch.device, meeting: Meeting | None = None) -> Iterator[None]:
    """Join the process group, and leave it in the end.

    After a failure the group stays as it is: leaving it would wait for peers that may be gone.

    meeting   None: where the environment says, as under `torchrun`
    raises    LostPeerError when a peer is lost or does not answer in time
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if meeting is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = meeting.store(timeout)
            dist.init_process_group(
                backend, timeout=timeout, store=store, rank=meeting.rank, world_size=meeting.num_ranks
            )
        yield
        dist.barrier()  # nobody leaves while a peer still needs it
    except RuntimeError as error:
        if not _is_peer_loss(error):
            raise
        raise LostPeerError(
            f"lost a peer, or waited longer than {timeout_seconds:g} s for one (parallel.timeout_seconds): "
            f"{str(error).splitlines()[0].partition('. ')[0]}"
        ) from error
    dist.destroy_process_group()


def broadcast_json(value: Any) -> Any:
    """Give every rank the value of rank 0; collective."""
    return gather_json(value if dist.get_rank() == 0 else None)[0]


def gather_json(value: Any) -> list[Any]:
    """Give every rank the values of all ranks, in rank order; collective.

    raises    EngineError when a rank announces more than MAX_PAYLOAD_BYTES
    """
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)]))
    largest = max(int(size) for size in sizes)
    if largest > MAX_PAYLOAD_BYTES:
        raise EngineError(f"a rank wants to exchange {largest} bytes of JSON: at most {MAX_PAYLOAD_BYTES} are allowed")
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: len(payload)] = payload
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [json.loads(bytes(piece[: int(size)].tolist())) for piece, size in zip(gathered, sizes, strict=True)]


def gather_arrays(array: ndarray) -> list[ndarray]:
    """Give every rank the arrays of all ranks, in rank order; collective.

    array     of one type and number of axes on all ranks; sizes may differ
    raises    EngineError when a rank announces more than MAX_ARRAY_BYTES
    """
    return [one for (one,) in gather_several([array])]


def gather_several(arrays: Sequence[ndarray]) -> list[list[ndarray]]:
    """Give every rank several arrays of all ranks, in rank order, for the price of one; collective.

    arrays    each of one type and number of axes on all ranks; sizes may differ
    raises    EngineError when a rank announces more than MAX_ARRAY_BYTES
    """
    joined = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    flat = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.zeros(0, dtype=torch.uint8)
    about = torch.tensor([len(flat), *(size for array in arrays for size in array.shape)])
    about_of = [torch.zeros_like(about) for _ in range(dist.get_world_size())]
    dist.all_gather(about_of, about)
    largest = max(int(other[0]) for other in about_of)
    if largest > MAX_ARRAY_BYTES:
        raise EngineError(
            f"a rank wants to exchange an array of {largest} bytes: at most {MAX_ARRAY_BYTES} are allowed"
        )
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: len(flat)] = flat
    gathered = [torch.empty_like(padded) for _ in about_of]
    dist.all_gather(gathered, padded)
    return [
        _taken_apart(piece.numpy().tobytes(), other[1:].tolist(), arrays)
        for piece, other in zip(gathered, about_of, strict=True)
    ]


def _taken_apart(joined: bytes, sizes: Sequence[int], like: Sequence[ndarray]) -> list[ndarray]:
    """Return arrays laid end to end, of the types and numbers of axes of others."""
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
    dist.all_reduce(total)
    return total


def largest_over_ranks(value: int) -> int:
    """Return the largest value of any rank; collective."""
    total = torch.tensor([value])
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return int(total)


_TRANSPORT = ("gloo/transport", "connection closed by peer", "connection reset by peer", "broken pipe", "timed out")


def _is_peer_loss(error: RuntimeError) -> bool:
    """Tell trouble between processes, which torch raises under many names, from a bug in this one."""
    if isinstance(error, EngineError):  # one of ours has said what it is
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _TRANSPORT)
