"""Local shards of sharded tensors, and sharded tensors whose shards are on another device than their mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(
    local: Tensor, like: Tensor, *, shape: Sequence[int] | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """Return a local shard as a tensor sharded like another one; the shard itself if that is not sharded.

    It shares the shard's memory, wherever that is: `DTensor.from_local` would move it to the device of the mesh.

    shape        of the whole tensor; None: that of the other one
    placements   of the tensor; None: those of the other one
    """
    if not isinstance(like, DTensor):
        return local
    whole = torch.empty(torch.Size(shape or like.shape), device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements or like.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def are_alike(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are sharded, or none is: kernels over lists of tensors take no mix."""
    return len({isinstance(tensor, DTensor) for tensor in tensors}) < 2
