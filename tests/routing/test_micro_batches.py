"""Micro-batches cut from traces: every row once, task sets pure and in turn."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.errors import TraceError
from relibra.routing.demand import ScheduledDemand
from relibra.routing.micro_batches import draw_samples, schedule_samples, select_micro_batches
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace
from tests.routing.slow_statistics import micro_batch_load


def _trace(lengths, groups=None, names=()):
    rng = np.random.default_rng(0)
    samples = [np.argsort(rng.random((n, 2, 8)), axis=2)[:, :, :2].astype(np.uint8) for n in lengths]
    trace = RoutingTrace.from_samples(samples, num_experts=8)
    return trace if groups is None else replace(trace, group_ids=np.array(groups), group_names=tuple(names))


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


def test_a_set_below_one_micro_batch_joins_the_others():
    trace = _trace([25, 10, 45], groups=[0, 1, 0], names=("a", "b"))
    demand = cut_recorded(trace, 20, 1)
    assert len(demand.load_MLE) == 4
    assert (demand.load_MLE == micro_batch_load(trace, 20)[:4]).all()


def _scheduled_in_order(demand):
    """Return the samples of each micro-batch in the order of the trace."""
    return [np.flatnonzero(demand.micro_batch_S == m).tolist() for m in range(len(demand.load_MLE))]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(1, 60),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_whole_samples_keep_the_limit_of_every_rank(lengths, limit, ranks, seed):
    trace = _trace(lengths)
    rng = None if seed is None else np.random.default_rng(seed)
    demand = schedule_samples(trace, limit, ranks, rng)
    tokens_S = np.array(lengths)
    assert demand.sample_ids.tolist() == trace.sample_ids.tolist()
    assert demand.length_S.tolist() == tokens_S.tolist()
    assert (demand.load_MLE.sum(axis=0) == demand.counts_SLE.sum(axis=0)).all()
    for m in range(len(demand.load_MLE)):
        for rank in range(ranks):
            own = tokens_S[(demand.micro_batch_S == m) & (demand.rank_S == rank)]
            assert own.sum() <= limit or (own > 0).sum() == 1
    samples = _scheduled_in_order(demand)
    assert all(samples)
    if rng is None:
        assert [s for one in samples for s in one] == list(range(len(lengths)))
    else:
        again = schedule_samples(trace, limit, ranks, np.random.default_rng(seed))
        assert (again.micro_batch_S == demand.micro_batch_S).all()


def test_micro_batches_are_few_and_even():
    demand = schedule_samples(_trace([5] * 21), 20, 2)  # 8 fit into a micro-batch
    assert [len(samples) for samples in _scheduled_in_order(demand)] == [7, 7, 7]
    assert demand.sum_per_rank(demand.length_S).tolist() == [[20, 15]] * 3
    long = schedule_samples(_trace([40, 3, 3, 40, 40]), 10, 2)
    assert long.sum_per_rank(long.length_S).tolist() == [[40, 6], [40, 40]]


def test_whole_samples_of_task_sets_alternate():
    trace = _trace([10] * 12, groups=[0] * 8 + [1] * 4, names=("a", "b"))
    demand = schedule_samples(trace, 20, 2)
    groups = [set(trace.group_ids[samples].tolist()) for samples in _scheduled_in_order(demand)]
    assert groups == [{0}, {1}, {0}]
    assert {0, 1} in [set(trace.group_ids[s].tolist()) for s in _scheduled_in_order(schedule_samples(trace, 40, 2))]


def test_samples_are_drawn_again_until_the_rows_are_there():
    trace = _trace([5, 12, 3])
    again = draw_samples(trace, 200, np.random.default_rng(0))
    again.validate()
    assert 188 < again.num_rows <= 200
    assert set(np.diff(again.offsets)) == {5, 12, 3}
    assert again.sample_ids.tolist() == list(range(again.num_samples))
    assert draw_samples(trace, 1, np.random.default_rng(0)).num_samples == 1
    with pytest.raises(TraceError, match="no rows"):
        draw_samples(_trace([0]), 5, np.random.default_rng(0))


def test_selecting_keeps_later_micro_batches():
    shape = TraceShape(rows_per_sample=[30] * 12, num_layers=2, num_experts=8, top_k=2)
    demand = cut_recorded(domain_trace(shape, np.random.default_rng(0)), 40, 2)
    later = select_micro_batches(demand, 4)
    assert (later.load_MLE == demand.load_MLE[4:]).all()
    assert (later.tokens_MLRE == demand.tokens_MLRE[4:]).all()
    assert later.top_k == 2
    attended_S = np.arange(len(demand.rank_S), dtype=np.int64)
    shared = select_micro_batches(replace(demand, attended_S=attended_S), 4)
    assert shared.attention_S.tolist() == attended_S[demand.micro_batch_S >= 4].tolist()
    place_X = np.arange(len(demand.rank_S))
    together_XS = (demand.micro_batch_S == demand.micro_batch_S[:, None]) & (demand.rank_S == demand.rank_S[:, None])
    piece_S = together_XS.argmax(axis=1)
    pieces = select_micro_batches(replace(demand, piece_S=piece_S), 4)
    kept_X = place_X[demand.micro_batch_S >= 4]
    assert kept_X[pieces.piece_S].tolist() == piece_S[kept_X].tolist()
    assert ScheduledDemand.of_groups([later, pieces]).piece_S.tolist() == [
        *range(len(kept_X)),
        *(len(kept_X) + pieces.piece_S).tolist(),
    ]
    both = ScheduledDemand.of_groups([shared, later])
    assert both.attention_S.tolist() == [*shared.attention_S.tolist(), *(later.length_S**2).tolist()]


@pytest.mark.parametrize("tokens", [0, 1000])
def test_impossible_cuts_get_a_sentence(tokens):
    with pytest.raises(TraceError, match="micro-batch"):
        cut_recorded(_trace([30]), tokens, 1)
    with pytest.raises(TraceError, match="at least 1 token"):
        schedule_samples(_trace([30]), 0, 1)
