"""Weights in host memory while a model is idle, so that their device memory is free for others (`update.offload`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from relibra.parallel.homes.logical_order import reshard
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.host_memory import host_memory
from relibra.rl.model.local_shards import local_shard


class _HostWeights:
    """Host memory of all weights of a model on this rank, taken once."""

    def __init__(self, model: nn.Module) -> None:
        shards = [local_shard(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]
        found = {own.untyped_storage()._cdata: own.untyped_storage() for own in shards if own.numel()}
        storages = [storage for storage in found.values() if storage.resizable()]  # on a CPU it may be a mapped file
        sizes = [storage.nbytes() for storage in storages]
        self._memory = host_memory(sum(sizes), shards[0].device)
        self._parts = list(zip(storages, self._memory.split(sizes), strict=True))
        self._frozen = not any(parameter.requires_grad for parameter in model.parameters())
        self._copied = self.is_away = False

    @torch.no_grad()
    def leave_device(self) -> None:
        for storage, part in self._parts:
            if not (self._frozen and self._copied):
                part.copy_(_bytes_of(storage), non_blocking=True)
            storage.resize_(0)
        self._copied = self.is_away = True
        if self._memory.is_pinned():
            torch.cuda.empty_cache()  # torch would keep what it freed

    @torch.no_grad()
    def come_back(self) -> None:
        for storage, part in self._parts:
            storage.resize_(part.numel())
            _bytes_of(storage).copy_(part, non_blocking=True)
        self.is_away = False


_of_models: WeakKeyDictionary[nn.Module, _HostWeights] = WeakKeyDictionary()


def move_to_host(model: nn.Module) -> None:
    """Copy the weights of a model to host memory, and free those on the device. Call between its passes.

    Parameters stay the same objects, without memory until `on_device`: nothing may read them. Gradients are not moved:
    after an optimizer step there are none.
    """
    reshard(model)
    weights = _of_models.get(model) or _of_models.setdefault(model, _HostWeights(model))
    if not weights.is_away:
        weights.leave_device()


@contextmanager
def on_device(*models: nn.Module) -> Iterator[None]:
    """Keep the weights of models on the device inside; those that were on the host return there afterwards."""
    away = [model for model in models if model in _of_models and _of_models[model].is_away]
    for model in away:
        _of_models[model].come_back()
    try:
        yield
    finally:
        for model in away:
            move_to_host(model)


@contextmanager
def idle_while_sampling(policy: nn.Module, update: UpdateSettings) -> Iterator[None]:
    """Keep the weights of the policy on the host inside, if they are to leave the device while a server samples."""
    if update.offload != "all":
        yield
        return
    move_to_host(policy)
    try:
        yield
    finally:
        _of_models[policy].come_back()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
