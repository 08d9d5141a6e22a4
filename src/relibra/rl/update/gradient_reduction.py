"""When gradients are summed over ranks: once per mini-batch, or in each micro-batch where whole ones do not fit.

Until they are summed, a rank holds gradients of whole weights, except those of experts, which no other rank has.
Summing in each micro-batch sends them once per micro-batch, beside the backward pass, and adds in another order. So
sizes alone decide, the same in all steps: neither a plan nor `update.offload` changes a bit of the result.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from relibra.parallel.homes.logical_order import reshard
from relibra.rl.run.ranks import largest_over_ranks

LARGEST_SHARE = 0.05
"""Share of the device memory that whole gradients may take: 4 GiB of 80."""


def reduces_each_micro_batch(whole_bytes: int, device_bytes: int | None) -> bool:
    """Return whether whole gradients are too large, so that each micro-batch sums them; `device_bytes` None: a CPU."""
    return device_bytes is not None and whole_bytes > LARGEST_SHARE * device_bytes


def whole_gradient_bytes(model: nn.Module) -> int:
    """Return the bytes that whole gradients of a sharded model take on a rank beside its shards, in float32."""
    trained = [one for one in model.parameters() if one.requires_grad and isinstance(one, DTensor)]
    shared = [one for one in trained if "ep" not in (one.device_mesh.mesh_dim_names or ())]
    return sum(4 * (one.numel() - one.to_local().numel()) for one in shared)


def each_micro_batch(model: nn.Module) -> bool:
    """Return whether the gradients of a model are summed in each micro-batch, alike on all ranks; collective."""
    if not isinstance(model, FSDPModule):
        return False
    reshard(model)  # what a pass before has left whole would not be counted
    device = next(model.parameters()).device
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return largest_over_ranks(reduces_each_micro_batch(whole_gradient_bytes(model), memory)) > 0
