"""Tensors and scalars of models and optimizers for a checkpoint, in logical expert order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from relibra.parallel import logical_order, relocate
from relibra.parallel.adapters import has_adapters, is_adapter
from relibra.parallel.balanced import balanced_layers
from relibra.parallel.homes.logical_order import reshard
from relibra.rl.model.adamw_8bit import blocks_of
from relibra.rl.model.local_shards import local_shard, sharded_like
from relibra.rl.model.optimizer import new_state
from relibra.rl.model.sharding import is_balanced

Homes = list[list[int]] | None
"""Logical expert at each position of each layer; None: the experts of the model cannot move."""


def tensors(models: Mapping[str, tuple[nn.Module, Optimizer | None]]) -> dict[str, Tensor]:
    """Return all tensors of models and optimizer states by name, without shards that are empty on this rank.

    Tied weights are there once; of the weights of a model with adapters only the adapters, as the others never change.

    They share memory with models and optimizers, so that loading into them changes these.
    """
    named: dict[str, Tensor] = {}
    for name, (model, optimizer) in models.items():
        reshard(model)
        adapted = has_adapters(model)
        once = {key for key, _ in model.named_parameters()}
        tied = {key for key, _ in model.named_parameters(remove_duplicate=False)} - once
        for key, tensor in model.state_dict().items():
            if key not in tied and (is_adapter(key) or not adapted):
                named[f"{name}/weights/{key}"] = tensor
        if optimizer is not None:
            for parameter_name, parameter in model.named_parameters():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if not _is_scalar(value):
                        blocks = {f"{key}/{part}": tensor for part, tensor in blocks_of(value).items()}
                        for path, stored in (blocks or {key: value}).items():
                            named[f"{name}/optimizer/{parameter_name}/{path}"] = stored
    one_block = {key: _one_block(tensor) for key, tensor in named.items()}
    return {key: tensor for key, tensor in one_block.items() if local_shard(tensor).numel()}


def scalars(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, float | None]]:
    """Return the optimizer state of each parameter by name: scalars, and None in place of tensors."""
    reshard(model)  # else the root has gathered parameters, which are no keys of the optimizer state
    return {
        name: {key: float(value) if _is_scalar(value) else None for key, value in state.items()}
        for name, parameter in model.named_parameters()
        if (state := optimizer.state.get(parameter))
    }


def restore_scalars(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Mapping[str, float | None]]) -> None:
    """Restore scalars of the optimizer state, and create its tensors with zeros, to be loaded into."""
    reshard(model)
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        where = parameter.device if optimizer.defaults.get("fused") else "cpu"  # where the kernels read step counts
        for key, number in saved.get(name, {}).items():
            is_tensor = number is None
            value = new_state(optimizer, parameter, key) if is_tensor else torch.tensor(number, device=where)
            optimizer.state[parameter][key] = value


@contextmanager
def in_logical_order(models: Mapping[str, tuple[nn.Module, Optimizer | None]]) -> Iterator[dict[str, Homes]]:
    """Move all experts to logical order inside, and back afterwards; yield their homes. Collective."""
    with ExitStack() as stack:
        homes = {name: _homes(model) for name, (model, _) in models.items()}
        for model, optimizer in models.values():
            if is_balanced(model):
                stack.enter_context(logical_order(model, optimizer))
        yield homes


@contextmanager
def at_saved_homes(
    models: Mapping[str, tuple[nn.Module, Optimizer | None]], homes: Mapping[str, Homes]
) -> Iterator[None]:
    """Move all experts to logical order inside, then to these homes; None: they stay in logical order. Collective."""
    balanced = {name: both for name, both in models.items() if is_balanced(both[0])}
    for model, optimizer in balanced.values():
        relocate(model, np.sort(np.array(_homes(model)), axis=1), optimizer)
    yield
    for name, (model, optimizer) in balanced.items():
        if homes[name] is not None:
            relocate(model, np.array(homes[name]), optimizer)


def _homes(model: nn.Module) -> Homes:
    if not is_balanced(model):
        return None
    return [layer.physical_to_logical_E.tolist() for layer in balanced_layers(model).values()]


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _one_block(tensor: Tensor) -> Tensor:
    """Return an expert parameter with placements that say that each rank has one block of rows.

    torch's checkpoints need that. transformers shards rows by FSDP inside each expert-parallel rank too, but here that
    dimension has one rank.
    """
    whole: Any = tensor.detach()
    if not isinstance(whole, DTensor) or not any(_is_strided(p) for p in whole.placements):
        return whole
    spread = zip(whole.placements, whole.device_mesh.shape, strict=True)
    assert all(size == 1 for p, size in spread if _is_strided(p)), "experts are sharded by FSDP too"
    spelled: list[Any] = list(whole.placements)
    placements = [Shard(p.dim) if _is_strided(p) else p for p in spelled]
    return sharded_like(whole.to_local(), whole, placements=placements)


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")
