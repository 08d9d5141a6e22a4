from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import Demand, TraceError
from relibra.routing.demand import count_token_slots, iterate_micro_batch_load
from relibra.routing.synthetic import TraceShape
from relibra.routing.trace_files import split_samples
from tests.routing.slow_statistics import micro_batch_load
from tests.routing.traces import balanced_trace, traces


def count_token_slots_reference(experts_TLK, valid_T, bounds, num_experts):
    """Do the same as `count_token_slots` with one `np.bincount` per piece and layer."""
    counts_NLE = np.zeros((len(bounds) - 1, experts_TLK.shape[1], num_experts), dtype=np.int64)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        rows = experts_TLK[start:stop][valid_T[start:stop]]
        for layer in range(experts_TLK.shape[1]):
            counts_NLE[n, layer] = np.bincount(rows[:, layer].ravel(), minlength=num_experts)
    return counts_NLE


@given(traces(), st.data())
def test_histogram_equals_its_reference(trace, data):
    inner = sorted(data.draw(st.lists(st.integers(0, trace.num_rows), max_size=4)))
    bounds = np.array([0, *inner, trace.num_rows])
    # The reference takes invalid rows out before counting, so ids beyond the experts on such rows do no harm there.
    fast = count_token_slots(trace.experts_TLK, trace.valid_T, bounds, trace.num_experts)
    slow = count_token_slots_reference(trace.experts_TLK, trace.valid_T, bounds, trace.num_experts)
    assert np.array_equal(fast, slow)
    assert fast.sum() == trace.valid_T.sum() * trace.num_layers * trace.top_k


@given(traces())
def test_demand_counts_each_sample(trace):
    demand = Demand.from_trace(trace)
    demand.validate()
    for sample in range(trace.num_samples):
        rows = trace.sample_rows(sample)
        expected = count_token_slots_reference(
            trace.experts_TLK[rows], trace.valid_T[rows], np.array([0, rows.stop - rows.start]), trace.num_experts
        )
        assert np.array_equal(demand.counts_SLE[sample], expected[0])


@given(traces(), st.integers(1, 10))
def test_demand_in_pieces_is_the_demand(trace, max_rows):
    whole, pieced = Demand.from_trace(trace), Demand.from_traces(split_samples(trace, max_rows))
    assert np.array_equal(whole.counts_SLE, pieced.counts_SLE)
    assert np.array_equal(whole.sample_ids, pieced.sample_ids)


@given(traces(), st.integers(1, 9), st.integers(1, 9))
def test_micro_batches_may_cross_samples_and_pieces(trace, tokens, max_rows):
    pieces = list(iterate_micro_batch_load(split_samples(trace, max_rows), tokens))
    load_MLE = np.concatenate(pieces) if pieces else np.zeros((0, trace.num_layers, trace.num_experts), np.int64)
    bounds = np.append(np.arange(0, trace.num_rows, tokens), trace.num_rows)
    expected = count_token_slots_reference(trace.experts_TLK, trace.valid_T, bounds, trace.num_experts)
    assert np.array_equal(load_MLE, expected)
    if trace.num_rows:
        assert np.array_equal(micro_batch_load(trace, tokens), expected)


def test_micro_batch_load_of_no_rows():
    trace = balanced_trace(TraceShape(rows_per_sample=[0], num_layers=2, num_experts=4, top_k=1))
    assert micro_batch_load(trace, 3).shape == (0, 2, 4)
    with pytest.raises(TraceError, match="at least 1 token"):
        micro_batch_load(trace, 0)


@given(traces(), st.integers(1, 4), st.data())
def test_schedule_splits_by_micro_batch_and_rank(trace, num_ranks, data):
    S = trace.num_samples
    micro_batch_S = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=S, max_size=S)))
    rank_S = np.array(data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=S, max_size=S)))
    demand = Demand.from_trace(trace).with_schedule(micro_batch_S, rank_S, num_ranks)
    demand.validate()
    assert demand.tokens_MLRE.shape[0] == max(-1, *micro_batch_S) + 1
    for m, r in np.ndindex(demand.tokens_MLRE.shape[0], num_ranks):
        chosen = (micro_batch_S == m) & (rank_S == r)
        assert np.array_equal(demand.tokens_MLRE[m, :, r], demand.counts_SLE[chosen].sum(axis=0))
    assert np.array_equal(demand.load_MLE, demand.tokens_MLRE.sum(axis=2))


def test_a_schedule_that_does_not_fit_is_refused():
    demand = Demand.from_trace(balanced_trace(TraceShape(rows_per_sample=[4, 4], num_layers=1, num_experts=4, top_k=2)))
    with pytest.raises(TraceError, match="demand of 2 samples"):
        demand.with_schedule(np.zeros(3, int), np.zeros(3, int), 1)
    with pytest.raises(TraceError, match=r"ranks 0\.\.2: allowed are 0\.\.1"):
        demand.with_schedule(np.zeros(2, int), np.array([0, 2]), 2)
    with pytest.raises(TraceError, match="no pieces"):
        Demand.from_traces([])


def test_routes_nobody_validated_do_no_harm():
    """Ids beyond the experts once counted into foreign memory."""
    trace = balanced_trace(TraceShape(rows_per_sample=[100], num_layers=2, num_experts=8, top_k=2))
    wild = replace(trace, experts_TLK=np.full_like(trace.experts_TLK, 200))
    with pytest.raises(TraceError, match="row 0 holds an expert id beyond the 8 experts"):
        Demand.from_trace(wild)
    with pytest.raises(TraceError, match="row bounds"):
        count_token_slots(trace.experts_TLK, trace.valid_T, np.array([0, 2**62]), 8)
    with pytest.raises(TraceError, match="different models"):
        Demand.from_traces([trace, replace(trace, layer_ids=np.array([4, 5], np.int32))])


def test_tiny_micro_batches_are_counted_in_bounded_memory(monkeypatch):
    trace = balanced_trace(TraceShape(rows_per_sample=[100], num_layers=2, num_experts=8, top_k=2))
    whole = micro_batch_load(trace, 3)
    monkeypatch.setattr("relibra.routing.demand._LOAD_BYTES", 5 * 2 * 8 * 8)
    pieces = list(iterate_micro_batch_load(split_samples(trace, 40), 3))
    assert max(map(len, pieces)) <= 5
    assert np.array_equal(np.concatenate(pieces), whole)


def test_lengths_and_sums_of_samples_per_rank():
    counts_SLE = np.zeros((4, 2, 8), np.int32)
    counts_SLE[:, :, 0] = counts_SLE[:, :, 1] = np.array([[3], [5], [7], [2]])
    demand = Demand(counts_SLE=counts_SLE, layer_ids=np.arange(2), sample_ids=np.arange(4), top_k=2)
    assert demand.length_S.tolist() == [3, 5, 7, 2]
    assert replace(demand, top_k=None).length_S.tolist() == [6, 10, 14, 4]
    scheduled = demand.with_schedule(np.array([1, 0, 1, -1]), np.array([2, 0, 2, 0]), 3)
    assert scheduled.sum_per_rank(demand.length_S).tolist() == [[5, 0, 0], [0, 0, 10]]
    assert scheduled.sum_per_rank(demand.length_S**2).tolist() == [[25, 0, 0], [0, 0, 9 + 49]]
