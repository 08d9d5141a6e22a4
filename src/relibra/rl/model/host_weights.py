"""Weights in host memory while a model is idle, so that their device memory is free for others (`update.offload`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from relibra.parallel.homes.logical_order import reshard
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.host_memory import host_memory
from relibra.rl.model.local_shards import local_shard


@dataclass(kw_only=True, eq=False)
class _HostCopy:
    """Host memory of all weights of a model on this rank.

    parts      device storage of some weights, and its bytes in the host memory
    trained    the model changes on the device
    is_away    its device memory is free
    """

    memory: Tensor
    parts: list[tuple[UntypedStorage, Tensor]]
    trained: bool
    is_away: bool = False


_copies: WeakKeyDictionary[nn.Module, _HostCopy] = WeakKeyDictionary()


@torch.no_grad()
def move_to_host(model: nn.Module) -> None:
    """Copy the weights of a model to host memory, and free those on the device; outside of its passes.

    Parameters stay the same objects, without memory: nothing may read them before `move_to_device`. Host memory is
    taken at the first time, and kept.
    """
    reshard(model)
    copy = _copies.get(model)
    is_new = copy is None
    if copy is None:
        copy = _copies[model] = _host_copy(model)
    if copy.is_away:
        return
    for storage, part in copy.parts:
        if is_new or copy.trained:
            part.copy_(_bytes_of(storage), non_blocking=True)
        storage.resize_(0)
    copy.is_away = True
    if copy.memory.is_pinned():
        torch.cuda.empty_cache()  # torch would keep what it freed


@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Copy the weights of a model that is on the host back to the device; another one is left as it is."""
    copy = _copies.get(model)
    if copy is None or not copy.is_away:
        return
    for storage, part in copy.parts:
        storage.resize_(part.numel())
        _bytes_of(storage).copy_(part, non_blocking=True)
    copy.is_away = False


@contextmanager
def on_host(*models: nn.Module) -> Iterator[None]:
    """Keep the weights of models on the host inside."""
    for model in models:
        move_to_host(model)
    try:
        yield
    finally:
        for model in models:
            move_to_device(model)


@contextmanager
def on_device(*models: nn.Module) -> Iterator[None]:
    """Bring the weights of models that are on the host to the device inside; others are there already."""
    away = [model for model in models if model in _copies and _copies[model].is_away]
    for model in away:
        move_to_device(model)
    try:
        yield
    finally:
        for model in away:
            move_to_host(model)


@contextmanager
def idle_while_sampling(policy: nn.Module, update: UpdateSettings) -> Iterator[None]:
    """Keep the weights of the policy on the host inside, if they are to leave the device while a server samples."""
    with on_host(*[policy] * (update.offload == "all")):
        yield


def _host_copy(model: nn.Module) -> _HostCopy:
    shards = [local_shard(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]
    storages = {own.untyped_storage()._cdata: own.untyped_storage() for own in shards if own.numel()}
    movable = [storage for storage in storages.values() if storage.resizable()]  # on a CPU it may be a mapped file
    memory = host_memory(sum(storage.nbytes() for storage in movable), shards[0].device)
    parts = list(zip(movable, memory.split([storage.nbytes() for storage in movable]), strict=True))
    return _HostCopy(memory=memory, parts=parts, trained=any(p.requires_grad for p in model.parameters()))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
