"""Logical order: experts in the order of their ids, which other programs expect, wherever their homes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from relibra.parallel.balanced import balanced_layers
from relibra.parallel.homes.relocation import relocate


@contextmanager
def logical_order(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Move experts into the order 0..E-1 within the `with` block, and back after it; collective, as is saving there.

    Nothing is sent if they are in that order already.

    optimizer   as in `relocate`
    raises      as `relocate`

        with logical_order(model, optimizer):
            model.save_pretrained(folder)
    """
    homes_LE = np.stack([layer.physical_to_logical_E for layer in balanced_layers(model).values()])
    logical_LE = np.broadcast_to(np.arange(homes_LE.shape[1]), homes_LE.shape)
    if np.array_equal(homes_LE, logical_LE):
        yield
        return
    relocate(model, logical_LE, optimizer)
    try:
        yield
    finally:
        relocate(model, homes_LE, optimizer)


def logical_parameters(model: nn.Module, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter by name, gathered whole, with expert rows in logical order; collective, no expert moves.

    Only one parameter is gathered at a time; all ranks have to iterate to the end.

    wanted    tells by name which parameters are gathered, the same on all ranks; None: all
    """
    reshard(model)
    layer_of = {
        id(getattr(layer.experts, name)): layer
        for layer in balanced_layers(model).values()
        for name in layer.parameter_names
    }
    for name, parameter in model.named_parameters():
        if wanted and not wanted(name):
            continue
        whole = full_tensor(parameter)
        layer = layer_of.get(id(parameter))
        position_E = None if layer is None else layer.positions_on(whole.device)
        yield name, whole if position_E is None else whole[position_E.to(whole.device)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters: the root module keeps them after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(parameter: Tensor) -> Tensor:
    """Return a parameter in full; collective if it is sharded."""
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
