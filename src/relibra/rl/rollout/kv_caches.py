"""Joining KV caches of batches that were prefilled apart, so that new responses share a decode step with old ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

_JOINED = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
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
