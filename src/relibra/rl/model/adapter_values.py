"""Values of adapters: initialized as peft does, the same on any number of ranks, and merged into weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from relibra.parallel.adapters import LoraLinear, adapted_modules, is_adapter, merged
from relibra.rl.model.local_shards import local_shard


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Set B to 0, and A to uniform numbers as peft does: variance 1 / (3 in), the same on any number of ranks.

    Numbers follow from seed, name and logical expert; experts are in logical order.
    """
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        stored, local = _stored_rows(parameter), local_shard(parameter)
        if name.endswith("lora_B"):
            local.zero_()
        elif parameter.ndim == 3:
            for row, expert in enumerate(stored):
                local[row] = _uniform(parameter.shape[1:], f"{seed} {name} {expert}")
        else:
            local.copy_(_uniform(parameter.shape, f"{seed} {name}")[stored.start : stored.stop])


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge the adapters of a whole model into its weights, which become float32, and return the model without them."""
    weights = dict(merged(model, [(name, p.detach()) for name, p in model.named_parameters()]))
    for name, module in list(adapted_modules(model)):
        module.__class__ = nn.Linear if isinstance(module, LoraLinear) else type(module).__mro__[2]
        for leaf, parameter in list(module._parameters.items()):
            if is_adapter(leaf):
                del module._parameters[leaf]
            elif parameter is not None:
                module._parameters[leaf] = nn.Parameter(weights[f"{name}.{leaf}"], requires_grad=False)
    return model


def _stored_rows(parameter: Tensor) -> range:
    """Return the rows (first axis) of a parameter that this rank stores; at most one mesh dimension cuts them."""
    rows = len(parameter)
    if not isinstance(parameter, DTensor):
        return range(rows)
    mesh = parameter.device_mesh
    cuts = [cut for cut in zip(mesh.shape, mesh.get_coordinate() or (), strict=True) if cut[0] > 1]
    assert len(cuts) <= 1, "FSDP and expert parallelism span the same ranks"
    ranks, own = cuts[0] if cuts else (1, 0)
    each = -(-rows // ranks)
    return range(min(rows, own * each), min(rows, (own + 1) * each))


def _uniform(shape: Iterable[int], key: str) -> Tensor:
    """Return uniform numbers `[..., in]` that follow from a text, as Kaiming's initialization with a = sqrt(5)."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    sizes = tuple(shape)
    bound = 1 / sqrt(sizes[-1])
    return torch.empty(sizes).uniform_(-bound, bound, generator=generator)
