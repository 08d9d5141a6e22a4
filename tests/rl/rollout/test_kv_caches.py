"""Caches that grow in place hold what those of transformers hold."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers.cache_utils import DynamicLayer

from relibra.rl.rollout.kv_caches import ROOM, GrowingLayer, can_join, growing_cache, join_caches

STEPS = st.lists(st.one_of(st.integers(1, 40), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=12)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 99))
@torch.inference_mode()
def test_updates_and_reorderings_give_the_same_states(steps, seed):
    torch.manual_seed(seed)
    ours, theirs = GrowingLayer(), DynamicLayer()
    rows = 3
    for step in [2, *steps]:
        if isinstance(step, list):
            kept = torch.tensor(step) % rows
            ours.reorder_cache(kept)
            theirs.reorder_cache(kept)
            rows = len(step)
            continue
        keys, values = torch.randn(rows, 2, step, 4), torch.randn(rows, 2, step, 4)
        for ours_of, theirs_of in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(ours_of, theirs_of)
        assert ours.get_seq_length() == theirs.get_seq_length()


@torch.inference_mode()
def test_a_step_writes_into_the_buffer_that_is_there():
    layer = GrowingLayer()
    state = torch.ones(2, 1, 3, 4)
    before = layer.update(state, state)[0].data_ptr()
    for _ in range(ROOM):
        assert layer.update(state[:, :, :1], state[:, :, :1])[0].data_ptr() == before
    assert layer.update(state[:, :, :1], state[:, :, :1])[0].data_ptr() != before


@torch.inference_mode()
def test_grown_caches_can_be_joined_and_grow_on():
    config = Qwen3Config(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    caches = [growing_cache(config) for _ in range(2)]
    for number, cache in enumerate(caches):
        state = torch.full((1, 1, 3 + number, 4), float(number + 1))
        cache.update(state, state, 0)
    assert all(can_join(cache) for cache in caches)
    joined = join_caches(caches, 4)
    new = torch.full((2, 1, 1, 4), 9.0)
    keys, _ = joined.update(new, new, 0)
    assert keys[:, 0, :, 0].tolist() == [[0.0, 1.0, 1.0, 1.0, 9.0], [2.0, 2.0, 2.0, 2.0, 9.0]]
