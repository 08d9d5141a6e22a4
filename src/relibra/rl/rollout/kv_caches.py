"""KV caches of batches that are decoded here: they grow in place, and those that were prefilled apart can be joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64
"""Columns that a cache which has to grow makes room for beyond those it needs now."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in buffers with room for more columns: a decode step writes one instead of copying all of them.

    `keys` and `values` are views of the columns in use. Whoever replaces them (a reordering, a join) leaves the buffers
    behind, which the next update notices.
    """

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: object, **_settings: object
    ) -> tuple[Tensor, Tensor]:
        """Add columns; return all there are. Not differentiable."""
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
    """Return an empty cache for a model; layers that see everything before them grow in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _with_room(states: Tensor, columns: int) -> Tensor:
    """Copy states into the first columns of a buffer; the rest is not read before it is written."""
    buffer = states.new_empty((*states.shape[:-2], columns, states.shape[-1]))
    buffer[..., : states.shape[-2], :] = states
    return buffer


_JOINED = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer, DummyLayer)
"""What we know how to join. Subclasses may hold more than keys and values, so exact types count."""


def can_join(cache: Cache) -> bool:
    """Tell whether all layers keep plain keys and values; states of linear attention, say, are not joined."""
    return all(type(layer) in _JOINED for layer in cache.layers)


def join_caches(caches: Sequence[Cache], width: int) -> Cache:
    """Put the rows of several caches under one another, in order; the first cache is changed and returned.

    Columns of a cache end with the latest token of each row, and rows that are shorter have padding before them. So
    caches are aligned at their ends: what a narrower one lacks is padding, and columns before the last `width` are
    padding in every row. Positions are part of the keys already and stay what they were.

    width   columns of the joined cache: tokens fed of the longest row
    """
    joined, *others = caches
    for index, layer in enumerate(joined.layers):
        parts = [layer, *(other.layers[index] for other in others)]
        if isinstance(layer, DummyLayer) or not layer.is_initialized:
            continue
        kept = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            kept = min(width, layer.sliding_window - 1)  # as much as the layer itself keeps between steps
            layer.cumulative_length = width
        layer.keys = torch.cat([last_columns(part.keys, kept, dim=-2) for part in parts])
        layer.values = torch.cat([last_columns(part.values, kept, dim=-2) for part in parts])
    return joined


def last_columns(states: Tensor, columns: int, dim: int) -> Tensor:
    """Cut or pad a tensor at its front to so many columns; padding is masked, so any finite number would do."""
    present = states.shape[dim]
    if present >= columns:
        return states.narrow(dim, present - columns, columns)
    shape = list(states.shape)
    shape[dim] = columns - present
    return torch.cat([states.new_zeros(shape), states], dim=dim)
