"""Bytes that decoder layers save for the backward pass, learned from a forward pass that keeps nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from relibra.rl.memory.ledger import rounded
from relibra.rl.model.local_shards import local_shard


@contextmanager
def counting_saved(
    layers: Sequence[nn.Module], experts: Mapping[int, nn.Module], others: Iterable[Tensor]
) -> Iterator[list[list[int]]]:
    """Yield, per layer, bytes that a forward pass in the `with` block saves: [outside, inside] of its experts module.

    Storages count once, inputs and parameters of layers not at all. What is saved is dropped: no backward pass can run.

    experts   modules, by number of the layer
    others    tensors that layers neither make nor have as parameters
    """
    found = [[0, 0] for _ in layers]
    known, where = dict[int, weakref.ref[Any]](), [-1, 0]  # layer that runs, and whether its experts do

    def note(tensor: Tensor) -> bool:  # whether its storage is new
        storage = local_shard(tensor).untyped_storage()
        before, known[storage._cdata] = known.get(storage._cdata), weakref.ref(storage)
        return before is None or before() is not storage

    def pack(tensor: Tensor) -> None:
        if where[0] >= 0 and note(tensor):
            found[where[0]][where[1]] += rounded(local_shard(tensor).untyped_storage().nbytes())

    def know(*tensors: Any) -> None:
        for one in tensors:
            if isinstance(one, Tensor):
                note(one)

    def enter(place: int, value: int, module: nn.Module, args: Any, named: Any) -> None:
        where[place] = value
        know(*module.parameters(), *tree_leaves((args, named) if place == 0 else ()))  # FSDP has gathered them by now

    def leave(place: int, value: int, *_: Any) -> None:
        where[place] = value

    know(*others)
    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(enter, 0, number), with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(partial(leave, 0, -1)))
        for module in experts.values():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, 1, 1), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(leave, 1, 0)))
        with saved_tensors_hooks(pack, lambda nothing: nothing):
            yield found
