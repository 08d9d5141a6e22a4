"""Rows of a trace found again from the demand that was counted from them."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.errors import TraceError
from relibra.routing.demand import Demand
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.micro_batches import schedule_samples, select_micro_batches
from relibra.routing.synthetic import TraceShape, domain_trace


def _trace(seed=0):
    shape = TraceShape(rows_per_sample=[30, 7, 44, 20], num_layers=2, num_experts=8, top_k=2)
    return domain_trace(shape, np.random.default_rng(seed), num_domains=2)


def _counts(trace, sample_T, num_samples):
    counts = np.zeros((num_samples, trace.num_layers, trace.num_experts), dtype=np.int64)
    for row in np.flatnonzero(sample_T >= 0):
        for layer, k in np.ndindex(*trace.experts_TLK.shape[1:]):
            counts[sample_T[row], layer, trace.experts_TLK[row, layer, k]] += 1
    return counts


@pytest.mark.parametrize("kind", ["whole", "recorded", "second half", "dealt"])
def test_rows_have_the_counts_of_their_samples(kind):
    trace = _trace()
    demand = {
        "whole": lambda: Demand.from_trace(trace),
        "recorded": lambda: cut_recorded(trace, 16, 2),
        "second half": lambda: select_micro_batches(cut_recorded(trace, 16, 2), 3),
        "dealt": lambda: schedule_samples(trace, 25, 2, np.random.default_rng(0)),
    }[kind]()
    sample_T = sample_of_rows(trace, demand)
    assert not ((sample_T >= 0) & ~trace.valid_T).any()
    np.testing.assert_array_equal(_counts(trace, sample_T, len(demand.sample_ids)), demand.counts_SLE)


def test_a_demand_of_another_trace_is_refused():
    with pytest.raises(TraceError, match="other counts"):
        sample_of_rows(_trace(1), cut_recorded(_trace(0), 16, 2))
    with pytest.raises(TraceError, match="not in it"):
        sample_of_rows(_trace(), replace(Demand.from_trace(_trace()), sample_ids=np.arange(7, 11)))
    with pytest.raises(TraceError, match="layers differ"):
        sample_of_rows(_trace(), replace(Demand.from_trace(_trace()), layer_ids=np.arange(5, 7)))
