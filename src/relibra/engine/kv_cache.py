"""`SlottedCache`: keys and values of running rows in slots, so that rows join and leave without a copy of the others.

Each layer has a buffer `[slots, ..., columns, dim]` for keys and one for values. The rows in use are the first slots.
Their latest tokens lie in one column, the end, so that a step writes one column behind it; a shorter row has zeros
before its first token. The columns in use are a view, whose start moves when the longest row leaves.

A model with layers of other kinds, such as states of linear attention, makes its own cache; rows leave, and none joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer


class Room(NamedTuple):
    """Size of the buffers of a cache; layers with a window need fewer columns."""

    slots: int
    columns: int

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.slots * self.columns


def room_for(rows: int, columns: int, most_tokens: int) -> Room:
    """Return room for rows and columns, with slots and then columns to spare as far as the tokens allow.

    >>> room_for(3, 200, 10_000), room_for(3, 200, 700)
    (Room(slots=4, columns=400), Room(slots=3, columns=233))
    """
    slots = max(rows, min(1 << (rows - 1).bit_length(), most_tokens // columns))
    return Room(slots, max(columns, min(2 * columns, most_tokens // slots)))


def order_without_gaps(kept: Sequence[int]) -> list[int]:
    """Return the row that each of the first slots gets; of ascending `kept` rows, the last ones fill the gaps.

    >>> order_without_gaps([0, 2, 3, 5])
    [0, 5, 2, 3]
    """
    stay, moved = set(kept), [row for row in kept if row >= len(kept)]
    return [slot if slot in stay else moved.pop() for slot in range(len(kept))]


class SlottedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer.

    room     of the buffers
    window   latest tokens that a token attends to, itself included; 0: all
    rows     slots in use
    width    columns of the longest row
    """

    def __init__(self, room: Room, window: int = 0) -> None:
        """Begin without rows; the first update makes the buffers."""
        super().__init__()
        self.room, self.window, self.is_sliding = room, window, window > 0
        self.rows = self.width = 0
        self._buffers: list[Tensor] = []
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def kept(self) -> int:
        """How many of the latest columns the next token attends to."""
        return self.kept_of(self.width)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_arguments: object, **_settings: object
    ) -> tuple[Tensor, Tensor]:
        """Add columns; return those that the new tokens attend to. Not differentiable."""
        added, kept = key_states.shape[-2], self.kept
        if not self._buffers:
            self.rows = key_states.shape[0]
            self._begin_like([key_states, value_states], added)
        elif self._end + added > self._buffers[0].shape[-2]:
            self._move(kept, kept + added)
        start, end = self._end, self._end + added
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, ..., start:end, :] = states
        self.width, self._end = self.width + added, end
        self.keys, self.values = (buffer[: self.rows, ..., start - kept : end, :] for buffer in self._buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the columns of the longest row."""
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the mask of new tokens has, and the number of the first."""
        return self.kept + query_length, self.width - self.kept

    def resize(self, room: Room) -> None:
        """Move to buffers of another size."""
        self.room = room
        if self._buffers:
            self._move(self.kept, self.kept)

    def keep(self, slots_X: Tensor, rows_X: Tensor, rows: int, width: int) -> None:
        """Copy rows `rows_X` to slots `slots_X`; then the first `rows` slots and last `width` columns are in use."""
        self.width, self.rows = width, rows
        columns = slice(self._end - self.kept, self._end)
        for buffer in self._buffers if len(slots_X) else ():
            buffer[slots_X, ..., columns, :] = buffer[rows_X, ..., columns, :]

    def take_in(self, other: SlottedLayer, rows_Y: Tensor, width: int) -> None:
        """Copy rows of `other` behind those here, and empty `other`; the longest row then has `width` columns."""
        if not self._buffers:
            self._begin_like(other._buffers, self.kept_of(width))
        self._widen(width)
        count, source = min(self.kept, other.kept), other._end
        for buffer, states in zip(self._buffers, other._buffers, strict=True):
            taken = buffer[self.rows : self.rows + len(rows_Y)]
            taken[..., self._end - count : self._end, :] = states[rows_Y, ..., source - count : source, :]
            taken[..., self._end - self.kept : self._end - count, :] = 0
        self.rows += len(rows_Y)
        other._buffers, other.rows = [], 0
        other.keys = other.values = torch.empty(0)  # they were views of the buffers

    def copy_beginning(self, row: int, left_out: int) -> None:
        """Add a row: a copy of another without its latest columns."""
        end, kept = self._end, self.kept
        for buffer in self._buffers:
            fresh = buffer[self.rows]
            fresh[..., end - kept + left_out : end, :] = buffer[row, ..., end - kept : end - left_out, :]
            fresh[..., end - kept : end - kept + left_out, :] = 0
        self.rows += 1

    def kept_of(self, width: int) -> int:
        """Return how many of the latest columns of a row the next token attends to."""
        return min(width, self.window - 1) if self.window else width

    def _begin_like(self, states: Sequence[Tensor], columns: int) -> None:
        self.lazy_initialization(*states)
        self._buffers = [self._empty(one, columns) for one in states]

    def _empty(self, states: Tensor, columns: int) -> Tensor:
        """Return an uninitialised buffer for states of this shape, with at least so many columns."""
        if self.window:
            columns = max(columns, min(self.room.columns, 2 * self.window))
        else:
            columns = max(columns, self.room.columns)
        slots = max(self.rows, self.room.slots)
        return states.new_empty((slots, *states.shape[1:-2], columns, states.shape[-1]))

    def _widen(self, width: int) -> None:
        """Use the columns that a longest row of `width` columns needs; rows that are here get zeros in added ones."""
        before, kept = self.kept, self.kept_of(width)
        if kept > self._end:
            self._move(kept, kept)
        self.width = width
        for buffer in self._buffers:
            buffer[: self.rows, ..., self._end - kept : self._end - before, :] = 0

    def _move(self, end: int, columns: int) -> None:
        """Copy the columns in use to new buffers of at least `columns`, so that they end at column `end`."""
        present = slice(self._end - self.kept, self._end)
        for index, buffer in enumerate(self._buffers):
            states = buffer[: self.rows, ..., present, :]
            fresh = self._empty(buffer, columns)
            fresh[: self.rows, ..., end - self.kept : end, :] = states
            self._buffers[index] = fresh
        self._end = end
        # Views of the old buffers would keep them until this layer is updated.
        self.keys, self.values = (buffer[: self.rows, ..., end - self.kept : end, :] for buffer in self._buffers)


class SlottedCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of all layers.

    can_join        every layer keeps plain keys and values, or nothing, so that rows may join
    made_by_model   if not `can_join`: the model's own cache, from its first pass on; `layers` here is then empty
    """

    def __init__(self, config: PreTrainedConfig, room: Room) -> None:
        """Begin without rows."""
        super().__init__(config=config)
        self.room = room
        self.can_join = all(type(layer) in _PLAIN for layer in self.layers)
        self.layers: list[Any] = [_slotted(layer, room) for layer in self.layers] if self.can_join else []
        self.made_by_model: Cache | None = None

    @property
    def for_model(self) -> Cache | None:
        """Return the cache that a pass gets; None: the model makes one, which is then set as `made_by_model`."""
        return self if self.can_join else self.made_by_model

    def make_room(self, rows: int, columns: int, most_tokens: int) -> None:
        """Make room for so many rows and columns, within `most_tokens`.

        Buffers that are large enough stay, unless they hold more tokens than allowed.
        """
        fits = rows <= self.room.slots and columns <= self.room.columns
        if not fits or self.room.tokens > most_tokens:
            self.room = room_for(rows, columns, most_tokens)
            for layer in self.slotted_layers():
                layer.resize(self.room)

    def keep(self, kept: Sequence[int], width: int, *, in_order: bool) -> list[int]:
        """Keep rows, given ascending, and the last `width` columns; return which row each slot now holds.

        in_order   rows keep their order; else the last ones go to gaps, and no others are copied
        """
        order = list(kept) if in_order else order_without_gaps(kept)
        slots_X, rows_X = torch.tensor([(slot, row) for slot, row in enumerate(order) if slot != row]).view(-1, 2).T
        for layer in self.slotted_layers():
            layer.keep(slots_X, rows_X, len(order), width)
        if self.made_by_model is not None:
            _reorder(self.made_by_model, torch.tensor(order))
        return order

    def take_in(self, other: SlottedCache, rows: Sequence[int], width: int) -> None:
        """Copy rows of the cache `other` behind those here, and empty it; the longest row then has `width` columns.

        Latest tokens come to lie in one column. A row may be named several times. `make_room` comes first.
        """
        rows_Y = torch.tensor(rows, dtype=torch.int64)
        for own, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(own, SlottedLayer) and theirs.is_initialized:
                own.take_in(theirs, rows_Y, width)

    def holds_all(self, columns: int) -> bool:
        """Return whether a row of so many columns is whole: none has left the window of a layer."""
        return all(layer.kept_of(columns) == columns for layer in self.slotted_layers())

    def copy_beginning(self, row: int, left_out: int) -> None:
        """Add a row: a copy of another, which is whole, without its latest columns. `make_room` comes first."""
        for layer in self.slotted_layers():
            layer.copy_beginning(row, left_out)

    def slotted_layers(self) -> list[SlottedLayer]:
        """Return the layers that have buffers."""
        return [layer for layer in self.layers if isinstance(layer, SlottedLayer)]


_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Layers that can be joined. Subclasses may hold more than keys and values, so types must match exactly."""


def _slotted(layer: Any, room: Room) -> Any:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        return layer
    return SlottedLayer(room, layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0)


def _reorder(cache: Cache, rows_B: Tensor) -> None:
    cache.reorder_cache(rows_B)
    for name, states in vars(cache).items():  # MiniMax has states outside of layers, which `reorder_cache` leaves
        if name != "layers" and isinstance(states, list):
            states[:] = [one[rows_B] if isinstance(one, Tensor) else one for one in states]


def cache_bytes(cache: Cache) -> int:
    """Return the bytes that a cache holds; may be called while another thread uses it."""
    if isinstance(cache, SlottedCache):
        made = cache.made_by_model
        return sum(layer.nbytes for layer in cache.slotted_layers()) + (cache_bytes(made) if made is not None else 0)
    held = [value for holder in (cache, *cache.layers) for value in list(vars(holder).values())]
    states = [one for value in held for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in states if isinstance(one, Tensor) and one.ndim > 1)
