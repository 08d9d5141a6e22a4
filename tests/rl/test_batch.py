"""Micro-batches: the cut, the layout, the filler."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.rl.batch import assign_micro_batches, filler_micro_batch, make_micro_batch
from relibra.rl.rollout.sample import RolloutSample, trace_of

L, K, E = 2, 2, 4


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_micro_batches_cover_every_sample_in_order_within_the_budget(lengths, max_tokens):
    runs = assign_micro_batches(lengths, max_tokens)
    assert [sample for run in runs for sample in run] == list(range(len(lengths)))
    for run, following in zip(runs, [*runs[1:], []], strict=False):
        assert run
        assert len(run) == 1 or max(lengths[s] for s in run) * len(run) <= max_tokens
        longer = [*run, *following[:1]]
        if following:  # no run was closed too early
            assert max(lengths[s] for s in longer) * len(longer) > max_tokens


def sample_of(tokens, prompt_length, seed=0):
    rng = np.random.default_rng(seed)
    return RolloutSample(
        sample_id=seed,
        group_id=0,
        tokens_n=np.array(tokens, dtype=np.int64),
        prompt_length=prompt_length,
        log_probs_r=-rng.random(len(tokens) - prompt_length, dtype=np.float32),
        experts_nLK=rng.random((len(tokens), L, E)).argsort(-1)[..., :K],
        weight_version=0,
        finish_reason="stop",
    )


SAMPLES = [sample_of([5, 6, 7], 1, 0), sample_of([8, 9, 10, 11, 12], 3, 1), sample_of([1, 2], 1, 2)]
ADVANTAGES = torch.tensor([1.0, 2.0, 3.0])


def trace_of_samples():
    return trace_of(SAMPLES, num_experts=E, layer_ids=range(L), source="test")


def test_layout_of_a_micro_batch():
    batch = make_micro_batch(SAMPLES, ADVANTAGES, [2, 0], trace_of_samples(), 0)
    assert batch.tokens_BN.tolist() == [[1, 2, 0], [5, 6, 7]]
    assert batch.attention_BN.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.response_BN.tolist() == [[False, True, False], [False, True, True]]
    assert batch.advantage_B.tolist() == [3.0, 1.0]
    assert batch.samples_B.tolist() == [2, 0]
    assert batch.sampled_BN[1, 1:].tolist() == SAMPLES[0].log_probs_r.tolist()
    assert batch.sampled_BN[~batch.response_BN].abs().sum() == 0
    assert batch.routes.valid_T.view(2, 3).tolist() == [[True, False, False], [True, True, False]]
    assert torch.equal(batch.routes.experts_TLK[3:5], torch.from_numpy(SAMPLES[0].experts_nLK[:2]))
    assert batch.routes.fallback_samples == ()


def test_without_a_trace_a_micro_batch_routes_anew():
    assert make_micro_batch(SAMPLES, ADVANTAGES, [1], None, 0).routes is None


def test_routes_of_other_tokens_are_refused():
    moved = [*SAMPLES[:2], sample_of([1, 2, 3], 1, 2)]
    with pytest.raises(TraceError, match="sample 2: the trace has 2 rows, the batch 3 tokens"):
        make_micro_batch(moved, ADVANTAGES, [2], trace_of_samples(), 0)
    changed = [*SAMPLES[:2], sample_of([13, 2], 1, 2)]
    with pytest.raises(TraceError, match="sample 2, row 0"):
        make_micro_batch(changed, ADVANTAGES, [2], trace_of_samples(), 0)


def test_a_filler_trains_nothing():
    batch = filler_micro_batch(0)
    assert not batch.response_BN.any()
    assert batch.tokens_BN.shape == batch.attention_BN.shape == batch.sampled_BN.shape
    assert batch.samples_B.tolist() == [-1]
    assert batch.routes is None
