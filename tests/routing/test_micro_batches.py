"""Micro-batches cut from traces: every row once, task sets pure and in turn."""

import numpy as np
import pytest

from relibra.errors import TraceError
from relibra.routing.micro_batches import cut_recorded, deal_samples, select_micro_batches
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace
from tests.routing.slow_statistics import micro_batch_load


def _trace(lengths, groups=None, names=()):
    rng = np.random.default_rng(0)
    samples = [np.argsort(rng.random((n, 2, 8)), axis=2)[:, :, :2].astype(np.uint8) for n in lengths]
    trace = RoutingTrace.from_samples(samples, num_experts=8)
    if groups is None:
        return trace
    from dataclasses import replace

    return replace(trace, group_ids=np.array(groups), group_names=tuple(names))


def test_recorded_order_cuts_exactly_and_drops_the_rest():
    trace = _trace([30, 50, 27])
    demand = cut_recorded(trace, 20, 2)
    assert demand.load_MLE.shape == (5, 2, 8)
    full = np.diff(trace.offsets).sum() // 20 * 20
    valid = trace.valid_T[:full].sum()
    assert demand.load_MLE[:, 0].sum() == 2 * valid
    assert (demand.load_MLE == micro_batch_load(trace, 20)[:5]).all()
    assert demand.tokens_MLRE.shape == (5, 2, 2, 8)
    assert (demand.tokens_MLRE.sum(axis=2) == demand.load_MLE).all()


def test_task_sets_take_turns_and_stay_pure():
    trace = _trace([25, 25, 45], groups=[0, 0, 1], names=("a", "b"))
    demand = cut_recorded(trace, 20, 1)
    first_of = [demand.sample_ids[demand.micro_batch_S == m].tolist() for m in range(4)]
    assert first_of == [[0], [2], [0, 1], [2]]


def test_a_set_too_small_for_one_micro_batch_makes_the_recording_one_set():
    trace = _trace([25, 10, 45], groups=[0, 1, 0], names=("a", "b"))
    demand = cut_recorded(trace, 20, 1)
    assert len(demand.load_MLE) == 4
    assert (demand.load_MLE == micro_batch_load(trace, 20)[:4]).all()


def test_shuffled_order_deals_whole_samples_within_the_limit():
    trace = _trace([5, 12, 3, 40, 9, 9, 1])
    demand = deal_samples(trace, 20, 3, np.random.default_rng(1))
    rows_S = np.diff(trace.offsets)
    rows_M = np.bincount(demand.micro_batch_S, weights=rows_S)
    assert demand.sample_ids.tolist() == trace.sample_ids.tolist()
    assert sorted(rows_M)[-1] == 40  # the long sample is alone
    assert (np.sort(rows_M)[:-1] <= 20).all()
    assert (demand.load_MLE.sum(axis=0) == demand.counts_SLE.sum(axis=0)).all()
    again = deal_samples(trace, 20, 3, np.random.default_rng(1))
    assert (again.micro_batch_S == demand.micro_batch_S).all()


def test_selecting_keeps_later_micro_batches():
    shape = TraceShape(rows_per_sample=[30] * 12, num_layers=2, num_experts=8, top_k=2)
    demand = cut_recorded(domain_trace(shape, np.random.default_rng(0)), 40, 2)
    later = select_micro_batches(demand, 4)
    assert (later.load_MLE == demand.load_MLE[4:]).all()
    assert (later.tokens_MLRE == demand.tokens_MLRE[4:]).all()
    assert later.top_k == 2


@pytest.mark.parametrize("tokens", [0, 1000])
def test_impossible_cuts_get_a_sentence(tokens):
    with pytest.raises(TraceError, match="micro-batch"):
        cut_recorded(_trace([30]), tokens, 1)
