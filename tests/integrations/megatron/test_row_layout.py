"""Rows of packed samples on tensor- and context-parallel ranks, against the trainers' own rules, token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import ConfigError, TraceError
from relibra.integrations.megatron.row_layout import RowLayout
from relibra.routing.demand import Demand
from relibra.routing.trace import RoutingTrace

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def slime_rows(lengths, tp, cp, multiplier):
    """slime's `slice_with_cp`, concatenation, padding and tensor-parallel slice, with (sample, token) as tokens."""
    result = []
    for cp_rank in range(cp):
        pack = []
        for sample, length in enumerate(lengths):
            tokens = [(sample, position) for position in range(length)]
            if cp > 1:
                chunk = (length + 2 * cp - 1) // (2 * cp)
                tokens += [(-1, -1)] * (2 * cp * chunk - length)
                last = 2 * cp - cp_rank
                tokens = tokens[chunk * cp_rank : chunk * (cp_rank + 1)] + tokens[chunk * (last - 1) : chunk * last]
            pack += tokens
        pack += [(-1, -1)] * (-len(pack) % (tp * multiplier))
        size = len(pack) // tp
        result += [pack[size * tp_rank : size * (tp_rank + 1)] for tp_rank in range(tp)]
    return result


def verl_rows(lengths, tp, cp):
    """verl's `preprocess_thd_engine` with zigzag, then `scatter_to_sequence_parallel_region`."""
    align = tp * cp * (2 if cp > 1 else 1)
    result = []
    for cp_rank in range(cp):
        pack = []
        for sample, length in enumerate(lengths):
            padded = length + (align - length % align) % align
            tokens = [(sample, position) for position in range(length)] + [(-1, -1)] * (padded - length)
            if cp > 1:
                half = padded // cp // 2
                end = padded - half * cp_rank
                tokens = tokens[half * cp_rank : half * (cp_rank + 1)] + tokens[end - half : end]
            pack += tokens
        size = len(pack) // tp
        result += [pack[size * tp_rank : size * (tp_rank + 1)] for tp_rank in range(tp)]
    return result


def as_pairs(rows):
    return [
        list(zip(samples, positions, strict=True))
        for samples, positions in zip(rows.sample_XT.tolist(), rows.position_XT.tolist(), strict=True)
    ]


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 8]))
def test_rows_are_those_of_slime(lengths, tp, cp, multiplier):
    layout = RowLayout.of_slime(tensor_ranks=tp, context_ranks=cp, data_pad_size_multiplier=multiplier)
    assert as_pairs(layout.rows(lengths)) == slime_rows(lengths, tp, cp, multiplier)


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_rows_are_those_of_verl(lengths, tp, cp):
    layout = RowLayout.of_verl(tensor_ranks=tp, context_ranks=cp)
    assert as_pairs(layout.rows(lengths)) == verl_rows(lengths, tp, cp)


@given(LENGTHS, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_a_contiguous_cut_gives_each_rank_one_run_of_the_pack(lengths, tp, cp):
    pairs = as_pairs(RowLayout.of_verl(tensor_ranks=tp, context_ranks=cp, order="contiguous").rows(lengths))
    seen = [pair for rank in pairs for pair in rank if pair[0] >= 0]
    assert seen == [(sample, position) for sample, length in enumerate(lengths) for position in range(length)]


def test_layouts_that_cannot_be_cut_are_refused():
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        RowLayout(context_ranks=2, sample_multiple=6)
    with pytest.raises(ConfigError, match="5 rows cannot be divided among 2"):
        RowLayout(tensor_ranks=2).rows([5])


def random_routes(lengths, layers, choices, experts, rng):
    return [
        np.stack(
            [rng.permuted(np.tile(np.arange(experts), (n, 1)), axis=1)[:, :choices] for _ in range(layers)], axis=1
        )
        for n in lengths
    ]


@given(LENGTHS, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(0, 99))
def test_each_row_takes_the_experts_of_its_token(lengths, tp, cp, seed):
    layers, choices, experts = 2, 3, 5
    routes = random_routes([n - 1 for n in lengths], layers, choices, experts, np.random.default_rng(seed))
    rows = RowLayout.of_verl(tensor_ranks=tp, context_ranks=cp).rows(lengths)
    for rank, pairs in enumerate(as_pairs(rows)):
        ids = rows.routes(rank, routes, num_experts=experts)
        for row, (sample, position) in enumerate(pairs):
            if sample >= 0 and position < lengths[sample] - 1:
                assert ids[row].tolist() == routes[sample][position].tolist()
            assert all(len(set(chosen)) == choices and max(chosen) < experts for chosen in ids[row].tolist())


def test_rows_without_a_route_take_experts_in_turn():
    routes = np.array([[[0, 1]], [[-1, -1]], [[2, 3]]])
    ids = RowLayout(sample_multiple=4).rows([3]).routes(0, [routes], num_experts=4)
    assert ids[:, 0].tolist() == [[0, 1], [2, 3], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((5, 1, 2), dtype=np.int64), "has 5 rows of routes for 3 tokens"),
        (np.full((3, 1, 2), 4), "expert ids 4 to 4: allowed are 0 to 3"),
        (np.zeros((3, 1, 9), dtype=np.int64), "9 choices of 4 experts"),
        (np.array([[[0, 1], [-1, -1]]] * 3), "in some layers only"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes, message):
    with pytest.raises(TraceError, match=message):
        RowLayout().rows([3]).routes(0, [routes], num_experts=4)


def test_routes_of_all_samples_are_needed():
    with pytest.raises(TraceError, match="2 samples"):
        RowLayout().rows([3, 3]).routes(0, [np.array([[[0, 1]]] * 3)], num_experts=4)


@settings(max_examples=20)
@given(LENGTHS, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([2, 4, 8]))
def test_a_demand_of_parts_counts_rows_at_their_rank(lengths, tp, cp, expert_ranks):
    """Two data-parallel ranks, each with a micro-batch of its own rows; groups of ranks share experts."""
    layers, choices, experts = 1, 2, 8
    layout = RowLayout.of_verl(tensor_ranks=tp, context_ranks=cp)
    rng, parts = np.random.default_rng(len(lengths)), []
    expected = np.zeros((2, layers, expert_ranks, experts), dtype=int)
    for data_rank in range(2):
        rows, routes = layout.rows(lengths), random_routes(lengths, layers, choices, experts, rng)
        for x in range(layout.num_ranks):
            _, place = layout.expert_rank(x, data_rank=data_rank, expert_ranks=expert_ranks)
            ids = rows.routes(x, routes, num_experts=experts)
            for sample, run in rows.slices(x):
                parts.append((ids[run], sample, data_rank, place))  # sample -1: padding
            for row in ids:
                for expert in row[0]:
                    expected[data_rank, 0, place, expert] += 1
    rows_of, samples, micro_batch_S, rank_S = zip(*parts, strict=True)
    trace = RoutingTrace.from_samples(rows_of, num_experts=experts, sample_ids=samples)
    demand = Demand.from_trace(trace).with_schedule(np.array(micro_batch_S), np.array(rank_S), expert_ranks, 2)
    demand.validate()
    assert demand.tokens_MLRE.tolist() == expected.tolist()
    of_samples = {s: int(demand.length_S[demand.sample_ids == s].sum()) for s in range(len(lengths))}
    assert of_samples == {s: 2 * n for s, n in enumerate(lengths)}
