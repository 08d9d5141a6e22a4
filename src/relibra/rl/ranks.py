"""The ranks of a run: joining them, and the few exchanges the trainer needs; payloads are JSON or numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from relibra.errors import EngineError

MAX_PAYLOAD_BYTES = 64 << 20


@contextmanager
def joined_ranks(timeout_seconds: float, device: torch.device) -> Iterator[None]:
    """Join the process group that the environment describes, and leave it in the end.

    raises    EngineError when a peer is lost or does not answer in time, naming this rank
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    rank = dist.get_rank()
    try:
        yield
    except RuntimeError as error:
        if not _is_peer_loss(error):
            raise
        raise EngineError(
            f"rank {rank} lost a peer or waited longer than {timeout_seconds:g} s for one (parallel.timeout_seconds): "
            f"{str(error).splitlines()[0]}"
        ) from error
    else:
        dist.barrier()  # nobody leaves while a peer still needs it
    finally:
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


def _is_peer_loss(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        sign in text for sign in ("connection closed by peer", "connection reset", "timed out", "gloo")
    )
