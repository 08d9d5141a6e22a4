"""`HomeShard`: the rows of one expert parameter that this rank stores, and the experts that they belong to.

An expert parameter is a DTensor `[E, ...]` on the mesh (efsdp, ep), or one such mesh per data-parallel replica: rank
`r` of the expert-parallel group is home to positions `r E / R` and on, and FSDP shards these over the efsdp ranks by
`torch.chunk`. Position `p` holds logical expert `physical_to_logical_E[p]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from numpy import ndarray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP


@dataclass(frozen=True, kw_only=True, eq=False)
class HomeShard:
    """Rows of one parameter of one layer on this rank.

    name        of the parameter in the experts module
    parameter   the sharded parameter itself
    rows        its local rows `[X, ...]`, a view: writing here changes the parameter; X = 0 if FSDP has more ranks than
                experts to shard
    first       position (0..E-1) of the first row; the others follow
    """

    name: str
    parameter: DTensor
    rows: Tensor
    first: int


class StoredRows(NamedTuple):
    """A tensor that holds one row per expert at home here; `rows` shares its memory."""

    name: str
    rows: Tensor

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one expert in this tensor."""
        return prod(self.rows.shape[1:]) * self.rows.element_size()


def home_shards(layer: BalancedEP) -> list[HomeShard]:
    """Return the expert parameters of a layer in the module's order, outside of its forward and backward pass."""
    return [_home_shard(layer, name) for name in layer.parameter_names]


def home_ranks(layer: BalancedEP) -> tuple[Int64[ndarray, " E"], Int64[ndarray, " E"]]:
    """Return global rank and local row of each position of a layer, inside this rank's data-parallel replica."""
    mesh, sizes = home_mesh(layer), _chunk_sizes(layer)
    replicas = mesh.mesh.cpu().numpy().reshape(-1, len(sizes), layer.ep_mesh.size())
    [own] = replicas[(replicas == dist.get_rank()).any(axis=(1, 2))]
    shard_of_row = np.repeat(np.arange(len(sizes)), sizes)
    row = np.concatenate([np.arange(size) for size in sizes])
    return own[shard_of_row].T.reshape(-1).astype(np.int64), np.tile(row, own.shape[1])


def home_mesh(layer: BalancedEP) -> DeviceMesh:
    """Return the mesh of the expert parameters of a layer; ep is its last dimension."""
    return _sharded(layer, layer.parameter_names[0]).device_mesh


def rows_by_expert(layer_id: int, layer: BalancedEP, optimizer: torch.optim.Optimizer | None) -> list[StoredRows]:
    """Return all tensors of a layer that hold a row per expert: parameters, gradients, optimizer states.

    optimizer   the one that trains the experts; None: there is none yet
    raises      EngineError when it does not train them, or keeps a state that cannot be cut by experts
    """
    trained = {id(p) for settings in optimizer.param_groups for p in settings["params"]} if optimizer else set()
    tensors = []
    for shard in home_shards(layer):
        tensors.append(StoredRows(shard.name, shard.rows))
        parameter: Any = shard.parameter
        if parameter.grad is not None:
            tensors.append(StoredRows(f"{shard.name}.grad", _local(parameter.grad)))
        if optimizer is None:
            continue
        if parameter.requires_grad and id(parameter) not in trained:
            raise EngineError(
                f"layer {layer_id}: the optimizer does not train {shard.name}, which requires gradients: pass the "
                "optimizer that does, or None while there is none"
            )
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            what = f"layer {layer_id}: optimizer state {key!r} of {shard.name}"
            tensors += [StoredRows(f"{shard.name}.{key}{part}", rows) for part, rows in _parts(value, shard.rows, what)]
    return tensors


def _home_shard(layer: BalancedEP, name: str) -> HomeShard:
    parameter, sizes = _sharded(layer, name), _chunk_sizes(layer)
    rows = parameter.to_local().detach()
    own = home_mesh(layer)["efsdp"].get_local_rank() if len(sizes) > 1 else 0
    assert len(rows) == sizes[own], f"{name}: {len(rows)} rows here, where chunks of {sizes} were expected"
    first = layer.ep_mesh.get_local_rank() * layer.num_local_experts + sum(sizes[:own])
    return HomeShard(name=name, parameter=parameter, rows=rows, first=first)


def _sharded(layer: BalancedEP, name: str) -> DTensor:
    parameter = getattr(layer.experts, name)
    assert isinstance(parameter, DTensor), f"{name} is not sharded: read shards between passes"
    return parameter


def _chunk_sizes(layer: BalancedEP) -> list[int]:
    """Return the number of rows on each efsdp rank."""
    mesh = home_mesh(layer)
    num_shards = mesh["efsdp"].size() if "efsdp" in (mesh.mesh_dim_names or ()) else 1
    sizes = [len(chunk) for chunk in torch.arange(layer.num_local_experts).chunk(num_shards)]
    return sizes + [0] * (num_shards - len(sizes))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _parts(value: object, rows: Tensor, what: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a state that have a row per expert, each with the end of its name.

    Two of a state that is quantized in blocks (torchao: `codes [X, ...]`, `scale [blocks]`), none of a number of the
    whole parameter, such as a step count.
    """
    if isinstance(value, Tensor):
        local: Any = _local(value)
        if local.shape == rows.shape and type(local) is Tensor:
            return [("", local)]
        codes, scale = getattr(local, "codes", None), getattr(local, "scale", None)
        if codes is not None and scale is not None and codes.shape == rows.shape and not len(scale) % len(rows):
            return [(".codes", codes), (".scale", scale.view(len(rows), -1))]
        kind = f"a {type(local).__name__} of shape {tuple(local.shape)}"
        belongs_to_all = local.numel() == 1
    else:
        kind = f"a {type(value).__name__}"
        belongs_to_all = value is None or isinstance(value, bool | int | float | str)
    if not belongs_to_all:
        raise EngineError(
            f"{what} is {kind}, the rows have shape {tuple(rows.shape)}, so it cannot be cut by experts: use an "
            "optimizer whose states are single numbers or plain tensors of the parameter's shape, such as AdamW"
        )
    return []
