"""Summary values against slow, obvious computations and cases made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.reporting.data.summary import Step, Summary, evenly_chosen, possible_ranks, summarize
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_statistics import compute_step_statistics
from tests.reporting.recordings import small_trace


def summary_of(*traces: RoutingTrace, tokens: int = 32, own_ranks: int | None = None) -> Summary:
    ranks = possible_ranks(traces[0].num_experts, own_ranks)
    statistics = [
        compute_step_statistics(lambda trace=trace: [trace], ranks=ranks, micro_batch_tokens=tokens) for trace in traces
    ]
    return summarize([Step(number=i, statistics=one) for i, one in enumerate(statistics)], own_ranks=own_ranks)


def test_steps_are_pooled_and_empty_ones_add_nothing() -> None:
    experts = np.zeros((3, 1, 1), dtype=np.int64)
    empty = RoutingTrace.from_samples([experts], num_experts=2, valid=[np.zeros(3, dtype=bool)])
    full = [
        RoutingTrace.from_samples([np.array(picks).reshape(4, 1, 1)], num_experts=2) for picks in ([0] * 4, [0, 1] * 2)
    ]
    summary = summary_of(full[0], empty, full[1], tokens=4)
    [pooled] = summary.skews.values()
    assert pooled.skew_ML.tolist() == [[2.0], [1.0]]
    assert (pooled.skew_mean, pooled.skew_weighted) == (1.5, 1.5)
    assert summary.step_M.tolist() == [0, 2]
    assert summary.stability.micro_batches == 2
    assert summary.stability.cosine == pytest.approx(1.0)
    assert summary.stability.step_to_step == pytest.approx(np.sqrt(0.5))


def test_invalid_rows_count_nowhere() -> None:
    experts = np.tile(np.array([[[0, 1]], [[2, 3]]]), (4, 1, 1))
    valid = np.tile([True, False], 4)
    summary = summary_of(RoutingTrace.from_samples([experts], num_experts=4, valid=[valid]), tokens=8)
    assert summary.tokens == 4
    assert summary.load_LE.tolist() == [[4, 4, 0, 0]]
    assert [(hot.expert, hot.share, hot.times_mean) for hot in summary.hottest][:2] == [(0, 0.5, 2.0), (1, 0.5, 2.0)]


def test_ranks_that_do_not_divide_the_experts_are_impossible() -> None:
    summary = summary_of(small_trace(num_experts=12), own_ranks=4)
    assert (list(summary.skews), summary.ranks) == ([2, 4], (2, 4, 8, 32))
    assert summary.headline[0] == summary.own_ranks == 4


def test_a_prime_number_of_experts_has_one_per_rank() -> None:
    assert list(summary_of(small_trace(num_experts=7)).skews) == [7]


def test_a_single_expert_has_nothing_to_balance() -> None:
    trace = RoutingTrace.from_samples([np.zeros((5, 2, 1), dtype=np.int64)], num_experts=1)
    assert summary_of(trace).headline is None


def test_groups_are_pooled_over_steps_by_name() -> None:
    experts = [np.full((n, 1, 1), expert) for n, expert in ((3, 0), (2, 1), (4, 0))]
    one = RoutingTrace.from_samples(experts, num_experts=2, group_ids=[1, 0, -1], group_names=["a", "b"])
    groups = {g.name: (g.samples, g.tokens, g.load_LE.tolist()) for g in summary_of(one, one).groups}
    assert groups == {"b": (2, 6, [[6, 0]]), "a": (2, 4, [[0, 4]])}


def test_steps_of_two_models_are_refused() -> None:
    with pytest.raises(TraceError, match=r"step 1 has 2 layers \(0-1\) x 8 experts, .* step 0 has 3 layers"):
        summary_of(small_trace(), small_trace(num_layers=2))


@given(st.integers(1, 500), st.integers(1, 20))
def test_evenly_chosen_positions_exist_and_end_with_the_last(num_items: int, limit: int) -> None:
    chosen = evenly_chosen(num_items, limit)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(limit, num_items)
    assert chosen[-1] == num_items - 1
    assert chosen[0] >= 0
