"""KV caches that grow in place, and the join of caches that were prefilled separately."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64
"""Extra columns that are allocated when a cache grows."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in buffers with room for more columns: a decode step writes one instead of copying all of them.

    `keys` and `values` are views of the columns in use. Code that replaces them (a reordering, a join) leaves the
    buffers unused, and the next update allocates new ones.
    """

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: object, **_settings: object
    ) -> tuple[Tensor, Tensor]:
        """Add columns; return all of them. Not differentiable."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self._buffers is None or not self._fits(end):
            self._buffers = (_with_room(self.keys, end + ROOM), _with_room(self.values, end + ROOM))
        keys, values = self._buffers
        keys[..., start:end, :], values[..., start:end, :] = key_states, value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def _fits(self, columns: int) -> bool:
        assert self._buffers is not None, "the caller looked"
        keys, _ = self._buffers
        return self.keys.data_ptr() == keys.data_ptr() and columns <= keys.shape[-2]


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache for a model; layers with full attention grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_room(states: Tensor, columns: int) -> Tensor:
    """Return a buffer with states in its first columns; the rest is not read before it is written."""
    buffer = states.new_empty((*states.shape[:-2], columns, states.shape[-1]))
    buffer[..., : states.shape[-2], :] = states
    return buffer


_JOINED = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Layers that can be joined. Subclasses may hold more than keys and values, so types must match exactly."""


def can_join(cache: Cache) -> bool:
    """Return whether all layers keep plain keys and values; states of linear attention cannot be joined."""
    return all(type(layer) in _JOINED for layer in cache.layers)


def join_caches(caches: Sequence[Cache], width: int) -> Cache:
    """Concatenate the rows of several caches, in order; the first cache is changed and returned.

    Columns of a cache end with the latest token of each row, and rows that are shorter have padding before them. So
    caches are aligned at their ends: narrower ones are padded in front, and columns before the last `width` are
    padding in every row. Positions are part of the keys already and do not change.

    width   columns of the joined cache: tokens fed of the longest row
    """
    joined, *others = caches
    for index, layer in enumerate(joined.layers):
        parts = [layer, *(other.layers[index] for other in others)]
        if isinstance(layer, DummyLayer) or not layer.is_initialized:
            continue
        kept = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            kept = min(width, layer.sliding_window - 1)  # the layer itself keeps this many between steps
            layer.cumulative_length = width
        layer.keys = torch.cat([last_columns(part.keys, kept, dim=-2) for part in parts])
        layer.values = torch.cat([last_columns(part.values, kept, dim=-2) for part in parts])
    return joined


def last_columns(states: Tensor, columns: int, dim: int) -> Tensor:
    """Return a tensor cut or padded in front to a number of columns; padding is masked, so any finite value works."""
    present = states.shape[dim]
    if present >= columns:
        return states.narrow(dim, present - columns, columns)
    shape = list(states.shape)
    shape[dim] = columns - present
    return torch.cat([states.new_zeros(shape), states], dim=dim)
