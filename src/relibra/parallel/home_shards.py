"""`HomeShard`: the rows of one expert parameter that this rank stores, and which experts they are.

An expert parameter is a DTensor `[E, ...]` on the mesh (efsdp, ep): rank `r` of the expert-parallel group is home to
positions `r E / R` and on, and FSDP shares these out over the efsdp ranks by `torch.chunk`. Position `p` holds logical
expert `physical_to_logical_E[p]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from relibra.parallel.balanced import BalancedEP


@dataclass(frozen=True, kw_only=True, eq=False)
class HomeShard:
    """Rows of one parameter of one layer on this rank.

    name        of the parameter in the experts module
    parameter   the parameter itself, whole and sharded
    rows        its local rows `[n, ...]`, a view: writing here changes the parameter; n = 0 where FSDP has more ranks
                than experts to share out
    first       position (0..E-1) of the first row; the others follow
    """

    name: str
    parameter: DTensor
    rows: Tensor
    first: int


def home_shards(layer: BalancedEP) -> list[HomeShard]:
    """List the expert parameters of a layer, outside of its forward and backward pass, in the module's order."""
    return [_home_shard(layer, name) for name in layer.names]


def _home_shard(layer: BalancedEP, name: str) -> HomeShard:
    parameter = getattr(layer.experts, name)
    assert isinstance(parameter, DTensor), f"{name} is not sharded: read shards between passes"
    rows = parameter.to_local().detach()
    mesh = parameter.device_mesh
    num_shards, own = 1, 0
    if "efsdp" in (mesh.mesh_dim_names or ()):
        num_shards, own = mesh["efsdp"].size(), mesh["efsdp"].get_local_rank()
    sizes = [len(chunk) for chunk in torch.arange(layer.num_local_experts).chunk(num_shards)]
    sizes += [0] * (num_shards - len(sizes))
    assert len(rows) == sizes[own], f"{name}: {len(rows)} rows here, where chunks of {sizes} were expected"
    first = layer.ep_mesh.get_local_rank() * layer.num_local_experts + sum(sizes[:own])
    return HomeShard(name=name, parameter=parameter, rows=rows, first=first)
