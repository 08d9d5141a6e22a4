"""The statistics of a trace against slow, obvious computations and cases made by hand."""

from __future__ import annotations

import doctest
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.routing import trace_statistics as survey_module
from relibra.routing.statistics import rank_skew, skew
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_files import split_samples
from relibra.routing.trace_statistics import chance_cosine, compute_statistics, compute_step_statistics, keep_halves
from tests.routing.slow_statistics import cosine_to_mean, fluctuation, micro_batch_load


def small_trace(seed: int = 0, *, rows: int = 20) -> RoutingTrace:
    shape = TraceShape(rows_per_sample=[rows] * 6, num_layers=3, num_experts=8, top_k=2)
    return domain_trace(shape, np.random.default_rng(seed), num_domains=2)


def one_layer(picks: list[int], valid: list[bool] | None = None) -> RoutingTrace:
    experts = np.array(picks).reshape(-1, 1, 1)
    return RoutingTrace.from_samples([experts], num_experts=2, valid=None if valid is None else [np.array(valid)])


def slow_rank_skew(trace: RoutingTrace, tokens: int, ranks: int) -> list[list[float]]:
    per_rank = trace.num_experts // ranks
    rows = []
    for start in range(0, trace.num_rows, tokens):
        skews = []
        for layer in range(trace.num_layers):
            work = [0] * ranks
            for t in range(start, min(start + tokens, trace.num_rows)):
                for expert in trace.experts_TLK[t, layer].tolist():
                    work[expert // per_rank] += 1
            skews.append(max(work) / (sum(work) / ranks))
        rows.append(skews)
    return rows


def test_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(survey_module).failed == 0


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([2, 4, 8]), st.sampled_from([24, 40, 60, 1000]))
def test_rank_skew_is_the_busiest_rank_over_the_mean(seed: int, ranks: int, tokens: int) -> None:
    trace = small_trace(seed)
    [layout] = compute_statistics(lambda: [trace], ranks=[ranks], micro_batch_tokens=tokens).layouts
    slow = slow_rank_skew(trace, tokens, ranks)
    np.testing.assert_allclose(layout.skew_ML, slow)
    assert layout.skew_mean == pytest.approx(np.mean(slow))
    assert layout.skew_max == pytest.approx(np.max(slow))


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([7, 24, 40]), st.sampled_from([1, 30, 1 << 20]))
def test_pieces_give_what_the_whole_gives(seed: int, tokens: int, cells: int) -> None:
    trace = small_trace(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey_module, "_CELLS_AT_ONCE", cells)
        result = compute_statistics(lambda: split_samples(trace, 30), ranks=[4], micro_batch_tokens=tokens)
    load_MLE = micro_batch_load(trace, tokens)
    np.testing.assert_array_equal(result.load_LE, load_MLE.sum(axis=0))
    np.testing.assert_allclose(result.layouts[0].skew_ML, rank_skew(load_MLE, 4))
    cosine_ML = cosine_to_mean(load_MLE)
    np.testing.assert_allclose(result.cosine_mean_L, cosine_ML.mean(axis=0))
    np.testing.assert_allclose(result.cosine_low_L, cosine_ML.min(axis=0))
    np.testing.assert_allclose(result.cosine_high_L, cosine_ML.max(axis=0))
    np.testing.assert_allclose(result.fluctuation_L, fluctuation(load_MLE))
    assert result.expert_skew == pytest.approx(skew(load_MLE).mean())
    assert (result.rows, result.samples, result.micro_batches) == (120, 6, -(-120 // tokens))


def test_weighted_skew_is_busiest_over_mean_work() -> None:
    # 2 experts on 2 ranks: micro-batch one is 3 : 1; the short rest, 2 tokens only, is 1 : 1.
    [layout] = compute_statistics(lambda: [one_layer([0, 0, 0, 1, 0, 1])], ranks=[2], micro_batch_tokens=4).layouts
    assert layout.skew_ML.tolist() == [[1.5], [1.0]]
    assert (layout.skew_mean, layout.skew_median) == (1.25, 1.25)
    assert layout.skew_weighted == pytest.approx((3 + 1) / (2 + 1))
    assert layout.idle_share == pytest.approx(1 - 3 / 4)


def test_a_micro_batch_without_a_token_is_left_out() -> None:
    trace = one_layer([0, 0, 0, 0, 1, 1], [True, True, False, False, True, True])
    result = compute_statistics(lambda: [trace], ranks=[2], micro_batch_tokens=2)
    assert (result.rows, result.tokens, result.micro_batches) == (6, 4, 2)
    assert result.layouts[0].skew_ML.tolist() == [[2.0], [2.0]]
    np.testing.assert_allclose(result.cosine_mean_L, 1 / np.sqrt(2))


def test_a_trace_without_a_token_is_refused() -> None:
    trace = one_layer([0, 0, 0], [False] * 3)
    with pytest.raises(TraceError, match="no token was routed"):
        compute_statistics(lambda: [trace], ranks=[2], micro_batch_tokens=2)
    with pytest.raises(TraceError, match="holds no samples"):
        compute_statistics(list, ranks=[2])
    assert compute_step_statistics(lambda: [trace], ranks=[2]).layouts[0].skew_ML.shape == (0, 1)


def test_a_trace_in_one_piece_is_read_once_and_others_twice() -> None:
    passes = []

    def pieces(max_rows: int):
        passes.append(max_rows)
        return split_samples(small_trace(), max_rows)

    compute_statistics(lambda: pieces(1000), ranks=[2])
    compute_statistics(lambda: pieces(30), ranks=[2])
    assert passes == [1000, 30, 30]


def test_tiny_micro_batches_do_not_fill_the_memory() -> None:
    shape = TraceShape(rows_per_sample=[100] * 80, num_layers=8, num_experts=128, top_k=2)
    trace = domain_trace(shape, np.random.default_rng(0), num_domains=2)
    compute_statistics(lambda: [trace], ranks=[8], micro_batch_tokens=1000)  # what is compiled and imported once
    tracemalloc.start()
    compute_statistics(lambda: [trace], ranks=[8], micro_batch_tokens=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    all_at_once = 8000 * 8 * 128 * 8  # bytes of one array of loads
    assert peak < 2 * all_at_once  # several such arrays were alive together
    assert peak < 120 << 20


def test_figures_are_json() -> None:
    figures = compute_statistics(lambda: [small_trace()], ranks=[2, 8]).figures()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["micro_batch_tokens"] == 16  # of 120 rows: eight micro-batches


def test_chance_cosine_is_what_random_draws_show() -> None:
    rng = np.random.default_rng(0)
    share_E = rng.dirichlet(np.ones(16))
    load_MLE = rng.multinomial(200, share_E, size=(500, 1))
    step_E = load_MLE.sum(axis=(0, 1))
    drawn = [c @ step_E / np.linalg.norm(c) / np.linalg.norm(step_E) for c in load_MLE[:, 0]]
    assert chance_cosine(load_MLE.sum(axis=0), len(load_MLE))[0] == pytest.approx(np.mean(drawn), abs=0.003)


def test_groups_are_added_up_over_pieces() -> None:
    experts = [np.full((n, 1, 1), expert) for n, expert in ((3, 0), (2, 1), (4, 0), (1, 1))]
    trace = RoutingTrace.from_samples(experts, num_experts=2, group_ids=[1, 0, -1, 1], group_names=["a", "b"])
    result = compute_statistics(lambda: split_samples(trace, 1), ranks=[2])
    groups = {group.name: (group.samples, group.tokens, group.load_LE.tolist()) for group in result.groups}
    assert groups == {"a": (1, 2, [[0, 2]]), "b": (2, 4, [[3, 1]])}
    assert result.load_LE.tolist() == [[7, 3]]


def test_halves_are_every_second_sample_without_lost_rows() -> None:
    experts = [np.full((rows, 1, 1), expert) for expert, rows in enumerate((3, 2, 4, 1))]
    valid = [np.arange(len(rows)) > 0 for rows in experts]
    trace = RoutingTrace.from_samples(experts, num_experts=4, valid=valid)
    first, second, num_experts = keep_halves(split_samples(trace, 3))
    assert num_experts == 4
    assert first.ravel().tolist() == [0, 0, 2, 2, 2]
    assert second.ravel().tolist() == [1]


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60), most=st.integers(1, 100))
@settings(deadline=None, max_examples=50)
def test_halves_of_a_large_trace_are_spaced_pairs(lengths: list[int], most: int) -> None:
    experts = [np.full((rows, 1, 1), sample) for sample, rows in enumerate(lengths)]
    trace = RoutingTrace.from_samples(experts, num_experts=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey_module, "_KEPT_ROWS", most)
        first, second, _ = keep_halves([trace])
    kept = {half % 2: sorted(set(some.ravel().tolist())) for half, some in enumerate((first, second))}
    assert all(sample % 2 == half for half, samples in kept.items() for sample in samples)
    pairs = sorted({sample // 2 for samples in kept.values() for sample in samples})
    assert len(first) + len(second) <= most or pairs == [0]
    if sum(lengths) <= most:
        assert len(first) + len(second) == sum(lengths)
    for half, some in enumerate((first, second)):
        for sample in kept[half]:
            assert (some == sample).sum() == min(lengths[sample], most)
