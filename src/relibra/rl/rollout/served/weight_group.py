"""Weights between trainer and servers without files: buckets of whole layers, and the group that they go through.

The servers' plug-in imports this file too (`integrations/vllm/weight_transfer.py`), so it needs torch alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 256 << 20
"""A bucket ends with the layer that fills it."""
MOST_BUCKET_BYTES = 16 << 30
"""Most that a server allocates for one bucket; a layer of a large model has a few GiB."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYER = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)")

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class GroupAddress:
    """Where the trainer, rank 0, and all workers of all servers meet.

    rank_offset       rank of a server's first worker
    timeout_seconds   for joining, and for each tensor
    """

    transport: Literal["gloo", "nccl"]
    host: str
    port: int
    world_size: int
    rank_offset: int
    timeout_seconds: float


@dataclass(frozen=True)
class BucketLayout:
    """Tensors of a bucket, in the order in which they are sent; fields as in vLLM's own requests.

    raises    ValueError, before anything is allocated, for what is no layout, or too large
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes) == len(set(self.names)):
            raise ValueError("names, dtype_names and shapes of a bucket differ in length, or a name is there twice")
        if unknown := sorted(set(self.dtype_names) - _DTYPES.keys()):
            raise ValueError(f"dtype {unknown[0]!r:.40}: allowed are {', '.join(_DTYPES)}")
        if any(type(size) is not int or size < 0 for shape in self.shapes for size in shape):
            raise ValueError("a shape holds something else than whole numbers from 0")
        listed = zip(self.dtype_names, self.shapes, strict=True)
        if (size := sum(math.prod(shape) * _DTYPES[name].itemsize for name, shape in listed)) > MOST_BUCKET_BYTES:
            raise ValueError(f"a bucket of {size:,} bytes: at most {MOST_BUCKET_BYTES:,} are allowed")

    def allocate(self, device: torch.device) -> Bucket:
        """Return tensors of these shapes without values."""
        listed = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [(name, torch.empty(shape, dtype=_DTYPES[dtype], device=device)) for name, dtype, shape in listed]


def layout_of(bucket: Bucket) -> BucketLayout:
    """Return what a bucket holds."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
    return BucketLayout([name for name, _ in bucket], dtypes, [list(tensor.shape) for _, tensor in bucket])


def whole_layers(
    named: Iterable[tuple[str, Tensor]], *, keep: bool = True, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield tensors in buckets of whole layers, in their order: of a layer sent in part the rest would be undefined.

    keep    False: buckets are empty, for ranks that only take part in the gathering
    """
    bucket, held, last = Bucket(), 0, ""
    for name, tensor in named:
        layer = found[0] if (found := _LAYER.match(name)) else name
        if layer != last and held >= bucket_bytes:
            yield bucket
            bucket, held = Bucket(), 0
        if keep:
            bucket.append((name, tensor.contiguous()))
        held, last = held + tensor.nbytes, layer
    yield bucket


def joined_key(rank: int) -> str:
    """Return the key in the store that says that a worker is about to join."""
    return f"joined/{rank}"


def join_group(store: Any, address: GroupAddress, rank: int) -> Any:
    """Join a process group beside those of trainer and server; raises RuntimeError where a rank does not come."""
    store.set(joined_key(rank), "")
    timeout = timedelta(seconds=address.timeout_seconds)
    named = dist.PrefixStore(address.transport, store)  # type: ignore[attr-defined]
    if address.transport == "gloo":
        return dist.ProcessGroupGloo(named, rank, address.world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(named, rank, address.world_size, options)


def broadcast_bucket(group: Any, bucket: Bucket) -> list[Any]:
    """Begin to send a bucket at rank 0, or to receive it at another; return the works to wait for.

    Tensors are contiguous. They go as bytes, which every back end takes.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return [group.broadcast([tensor.view(-1).view(torch.uint8)], options) for _, tensor in bucket if tensor.numel()]
