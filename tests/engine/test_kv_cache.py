"""Slots hold what rows hold that are kept apart: each row's own columns, behind zeros."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, JambaConfig

from relibra.engine.kv_cache import (
    Room,
    SlottedCache,
    cache_bytes,
    order_without_gaps,
    room_for,
)

WINDOW, HEADS, DIM = 5, 2, 3
CONFIG = GptOssConfig(
    num_hidden_layers=2,
    layer_types=["full_attention", "sliding_attention"],
    sliding_window=WINDOW,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    head_dim=DIM,
)
PLACES = 240
JOIN = st.lists(st.integers(1, 9), min_size=1, max_size=3)
LEAVE = st.sets(st.integers(0, 7), min_size=1, max_size=3)
BORROW = st.tuples(st.integers(0, 7), st.integers(1, 4))
STEPS = st.integers(1, 12)


class Apart:
    """The obvious cache: keys `[heads, tokens, dim]` of each row by itself; values are their negatives."""

    def __init__(self):
        self.rows = []

    def view(self, columns):
        """Return the last columns of all rows, shorter ones with zeros in front."""
        width = max(row.shape[1] for row in self.rows)
        padded = [torch.nn.functional.pad(row, (0, 0, width - row.shape[1], 0)) for row in self.rows]
        return torch.stack(padded)[..., -columns:, :]


def fed(cache, layer, keys):
    """Update a layer; return the keys that it shows, after a look at the values."""
    shown, values = cache.update(keys, -keys, layer)
    assert torch.equal(shown, -values)
    return shown


def prefilled(lengths, generator):
    """Return a cache with prompts that were fed in two pieces, and the rows by themselves."""
    width = max(lengths)
    rows = [torch.randn(HEADS, n, DIM, generator=generator) for n in lengths]
    both = torch.stack([torch.nn.functional.pad(row, (0, 0, width - row.shape[1], 0)) for row in rows])
    cache = SlottedCache(CONFIG, Room(len(lengths), width))
    for layer in range(2):
        for piece in (both[:, :, : width // 2], both[:, :, width // 2 :]):
            if piece.shape[2]:
                fed(cache, layer, piece)
    return cache, rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(JOIN, LEAVE, BORROW, STEPS), min_size=1, max_size=14), st.integers(0, 99), st.booleans())
@torch.inference_mode()
def test_rows_join_leave_and_grow_as_if_they_were_apart(events, seed, tight):
    generator = torch.Generator().manual_seed(seed)
    cache, apart, places = SlottedCache(CONFIG, Room(0, 0)), Apart(), PLACES
    for event in events:
        if isinstance(event, list) and len(apart.rows) + len(event) < 9:
            other, rows = prefilled(event, generator)
            taken = [*range(len(rows)), 0]  # the first prompt has two answers
            apart.rows += [rows[b] for b in taken]
            width = max(row.shape[1] for row in apart.rows)
            places = len(apart.rows) * (width + 1) if tight else PLACES
            cache.make_room(len(apart.rows), width + 1, places)
            cache.take_in(other, taken, width)
            assert cache_bytes(other) == 0
        elif isinstance(event, set) and apart.rows:
            kept = [b for b in range(len(apart.rows)) if b not in event]
            if not kept:
                cache, apart.rows = SlottedCache(CONFIG, Room(0, 0)), []
                continue
            width = max(apart.rows[b].shape[1] for b in kept)
            order = cache.keep(kept, width, in_order=seed % 2 == 0)
            apart.rows = [apart.rows[b] for b in order]
        elif isinstance(event, tuple) and event[0] < len(apart.rows) < 8:
            row, width = apart.rows[event[0]], max(row.shape[1] for row in apart.rows)
            whole = row.shape[1] < WINDOW
            assert cache.holds_all(row.shape[1]) == whole
            if whole and event[1] <= row.shape[1] and (len(apart.rows) + 1) * (width + 1) <= PLACES:
                cache.make_room(len(apart.rows) + 1, width + 1, PLACES)
                cache.copy_beginning(event[0], event[1])
                apart.rows.append(row[:, : row.shape[1] - event[1]])
        for _ in range(event if isinstance(event, int) and apart.rows else 1):
            if not apart.rows:
                continue
            width = max(row.shape[1] for row in apart.rows)
            if len(apart.rows) * (width + 1) > PLACES:
                break
            places = len(apart.rows) * (width + 1) if tight else PLACES
            cache.make_room(len(apart.rows), width + 1, places)
            assert cache.room.tokens <= places
            new = torch.randn(len(apart.rows), HEADS, 1, DIM, generator=generator)
            apart.rows = [torch.cat([row, one], dim=1) for row, one in zip(apart.rows, new, strict=True)]
            for layer, columns in enumerate((width + 1, min(width, WINDOW - 1) + 1)):
                assert cache.layers[layer].get_mask_sizes(1) == (columns, width + 1 - columns)
                assert torch.equal(fed(cache, layer, new), apart.view(columns))
                assert cache.get_seq_length(layer) == width + 1
            full = 2 * 4 * HEADS * DIM * cache.room.tokens
            assert full <= cache_bytes(cache) <= 2 * full


@given(st.sets(st.integers(0, 20), min_size=1))
def test_rows_that_stay_move_only_into_gaps(kept):
    order = order_without_gaps(sorted(kept))
    assert sorted(order) == sorted(kept)
    assert all(row == slot or row >= len(kept) for slot, row in enumerate(order))


@given(st.integers(1, 64), st.integers(1, 500), st.integers(1, 40_000))
def test_room_is_enough_and_within_the_limit(rows, columns, places):
    room = room_for(rows, columns, places)
    assert room.slots >= rows
    assert room.columns >= columns
    assert room.tokens <= max(places, rows * columns)


@torch.inference_mode()
def test_rows_that_join_and_leave_move_no_other():
    cache, generator = SlottedCache(CONFIG, Room(0, 0)), torch.Generator().manual_seed(0)
    cache.make_room(4, 20, PLACES)
    cache.take_in(prefilled([6, 4], generator)[0], [0, 1], 6)
    first = fed(cache, 0, torch.zeros(2, HEADS, 1, DIM))[0, 0, 0].data_ptr()
    cache.take_in(prefilled([5], generator)[0], [0], 7)
    cache.keep([0, 2], 7, in_order=False)
    assert fed(cache, 0, torch.zeros(2, HEADS, 1, DIM))[0, 0, 0].data_ptr() == first


def test_states_without_columns_cannot_be_joined():
    assert SlottedCache(CONFIG, Room(0, 0)).can_join
    assert not SlottedCache(JambaConfig(), Room(0, 0)).can_join


@torch.inference_mode()
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_states_of_a_row_that_left_do_not_reach_others(broken):
    cache, generator = SlottedCache(CONFIG, Room(0, 0)), torch.Generator().manual_seed(1)
    cache.make_room(2, 30, PLACES)
    cache.take_in(prefilled([3, 3], generator)[0], [0, 1], 3)
    for layer in range(2):
        states = torch.tensor([0.0, broken])[:, None, None, None].expand(2, HEADS, 4, DIM)
        cache.update(states, states, layer)
    cache.keep([0], 7, in_order=False)
    cache.take_in(prefilled([2], generator)[0], [0], 7)
    for layer in range(2):
        assert fed(cache, layer, torch.zeros(2, HEADS, 1, DIM)).isfinite().all()
