"""Summary values against slow, obvious computations and cases made by hand."""

from __future__ import annotations

import doctest
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.reporting.sentences import idle_words, one_plan_or_many, verdict
from relibra.reporting.step_load import chance_cosine, summarize_step
from relibra.reporting.summary import Stability, Summary, evenly_chosen, rank_counts, summarize
from relibra.routing.trace import RoutingTrace

from .recordings import small_trace


def summary_of(*traces: RoutingTrace, tokens: int = 32, own_ranks: int | None = None) -> Summary:
    ranks = rank_counts(traces[0].num_experts, own_ranks)
    steps = [summarize_step(t, ranks=ranks, micro_batch_tokens=tokens, step=i) for i, t in enumerate(traces)]
    return summarize(steps, micro_batch_tokens=tokens, own_ranks=own_ranks)


def slow_rank_skew(trace: RoutingTrace, tokens: int, ranks: int) -> list[list[float]]:
    per_rank = trace.num_experts // ranks
    rows = []
    for start in range(0, trace.num_rows, tokens):
        skews = []
        for layer in range(trace.num_layers):
            work = [0] * ranks
            for t in range(start, min(start + tokens, trace.num_rows)):
                if trace.valid_T[t]:
                    for expert in trace.experts_TLK[t, layer].tolist():
                        work[expert // per_rank] += 1
            skews.append(max(work) / (sum(work) / ranks) if sum(work) else 1.0)
        rows.append(skews)
    return rows


@pytest.mark.parametrize("name", ["metrics", "sentences", "step_load", "summary"])
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(import_module(f"relibra.reporting.{name}")).failed == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([2, 4, 8]), st.sampled_from([24, 40, 60]))
def test_rank_skew_is_the_busiest_rank_over_the_mean(seed: int, ranks: int, tokens: int) -> None:
    trace = small_trace(seed)
    step = summarize_step(trace, ranks=[ranks], micro_batch_tokens=tokens)
    np.testing.assert_allclose(step.rank_skews[ranks], slow_rank_skew(trace, tokens, ranks))


def test_mean_skew_is_total_busiest_work_over_total_mean_work() -> None:
    # 2 experts on 2 ranks: micro-batch one is 3 : 1, micro-batch two, with 2 tokens only, is 1 : 1.
    picks = [0, 0, 0, 1, 0, 1]
    trace = RoutingTrace.from_samples([np.array(picks).reshape(6, 1, 1)], num_experts=2)
    summary = summary_of(trace, tokens=4)
    view = summary.headline
    assert view is not None
    assert view.ranks == 2
    assert view.skew_ML is not None
    assert view.skew_ML.tolist() == [[1.5], [1.0]]
    assert view.mean == pytest.approx((3 + 1) / (2 + 1))
    assert view.idle == pytest.approx(1 - 3 / 4)
    assert view.median == pytest.approx(1.25)
    assert verdict(summary) == (
        "On 2 ranks the busiest one does 1.33× the mean expert work; "
        "waiting for it costs the ranks 25\u202f% of the expert time."
    )


def test_a_rest_below_half_a_micro_batch_counts_for_load_but_not_for_skew() -> None:
    step = summarize_step(small_trace(rows=11), ranks=[2], micro_batch_tokens=32)  # 66 rows
    assert step.rank_skews[2].shape == (2, 3)
    assert step.load_LE.sum() == 66 * 3 * 2


def test_invalid_rows_count_nowhere() -> None:
    experts = np.tile(np.array([[[0, 1]], [[2, 3]]]), (4, 1, 1))
    valid = np.tile([True, False], 4)
    summary = summary_of(RoutingTrace.from_samples([experts], num_experts=4, valid=[valid]), tokens=8)
    assert summary.tokens == 4
    assert summary.load_LE.tolist() == [[4, 4, 0, 0]]
    assert [(hot.expert, hot.share, hot.times_mean) for hot in summary.hottest][:2] == [(0, 0.5, 2.0), (1, 0.5, 2.0)]


def test_ranks_that_do_not_divide_the_experts_are_said_to_be_impossible() -> None:
    summary = summary_of(small_trace(num_experts=12), own_ranks=4)
    assert [(view.ranks, view.is_own) for view in summary.possible] == [(2, False), (4, True)]
    words = {view.ranks: idle_words(view, 12) for view in summary.rank_views}
    assert words[8] == "not possible: 12 experts, 8 ranks"
    assert words[32] == "not possible: 12 experts, 32 ranks"
    assert summary.headline is not None
    assert summary.headline.ranks == 4


def test_a_prime_number_of_experts_is_shown_with_one_expert_per_rank() -> None:
    assert [view.ranks for view in summary_of(small_trace(num_experts=7)).possible] == [7]


def test_a_single_expert_has_nothing_to_balance() -> None:
    trace = RoutingTrace.from_samples([np.zeros((5, 2, 1), dtype=np.int64)], num_experts=1)
    assert verdict(summary_of(trace)) == "With one expert per layer there is nothing to balance."


def test_chance_cosine_is_what_random_draws_show() -> None:
    rng = np.random.default_rng(0)
    share_E = rng.dirichlet(np.ones(16))
    load_MLE = rng.multinomial(200, share_E, size=(500, 1))
    step_E = load_MLE.sum(axis=(0, 1))
    drawn = [c @ step_E / np.linalg.norm(c) / np.linalg.norm(step_E) for c in load_MLE[:, 0]]
    assert chance_cosine(load_MLE)[0] == pytest.approx(np.mean(drawn), abs=0.003)


def test_groups_are_pooled_over_steps_by_name() -> None:
    experts = [np.full((n, 1, 1), expert) for n, expert in ((3, 0), (2, 1), (4, 0))]
    one = RoutingTrace.from_samples(experts, num_experts=2, group_ids=[1, 0, -1], group_names=["a", "b"])
    groups = {g.name: (g.samples, g.tokens, g.load_LE.tolist()) for g in summary_of(one, one).groups}
    assert groups == {"b": (2, 6, [[6, 0]]), "a": (2, 4, [[0, 4]])}


def test_steps_of_two_models_are_refused() -> None:
    with pytest.raises(TraceError, match="step 1 has 2 layers x 8 experts, 2 choices per token, step 0 has 3 layers"):
        summary_of(small_trace(), small_trace(num_layers=2))


def test_a_recording_without_tokens_is_refused() -> None:
    experts = np.zeros((3, 1, 1), dtype=np.int64)
    trace = RoutingTrace.from_samples([experts], num_experts=2, valid=[np.zeros(3, dtype=bool)])
    with pytest.raises(TraceError, match="no token"):
        summary_of(trace)


@pytest.mark.parametrize(
    ("cosine", "chance", "begins"),
    [
        (0.99, 0.999, "One plan per step would be enough"),
        (0.95, 0.999, "One plan per step would take out most of the skew, not all."),
        (0.95, 0.960, "One plan per step would take out most of the skew. "),
        (0.70, 0.999, "Each micro-batch needs its own plan. "),
        (0.70, 0.710, "Each micro-batch needs its own plan, because it is small"),
    ],
)
def test_stability_in_words(cosine: float, chance: float, begins: str) -> None:
    value = Stability(
        cosine_ML=np.full((2, 1), cosine), cosine=cosine, chance=chance, fluctuation=0.1, step_to_step=None
    )
    assert one_plan_or_many(value).startswith(begins)


@given(st.integers(1, 500), st.integers(1, 20))
def test_evenly_chosen_positions_exist_and_end_with_the_last(num_items: int, limit: int) -> None:
    chosen = evenly_chosen(num_items, limit)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(limit, num_items)
    assert chosen[-1] == num_items - 1
    assert chosen[0] >= 0
