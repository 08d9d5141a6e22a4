from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import RoutingTrace, TraceError
from relibra.routing.trace import (
    concatenate,
    expert_dtype,
    first_illegal_row,
    hash_tokens,
)
from tests.routing.traces import assert_same, traces


def _samples(rows=(4, 3), L=2, K=2, E=8, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.random((n, L, E)).argsort(-1)[..., :K] for n in rows]


def test_ids_of_different_types_are_joined():
    signed, unsigned = _samples()
    trace = RoutingTrace.from_samples([signed.astype(np.int64), unsigned.astype(np.uint64)], num_experts=8)
    assert_same(trace, RoutingTrace.from_samples([signed, unsigned], num_experts=8))


def test_ids_take_the_narrowest_type():
    assert RoutingTrace.from_samples(_samples(), num_experts=8).experts_TLK.dtype == np.uint8
    assert RoutingTrace.from_samples(_samples(E=300), num_experts=300).experts_TLK.dtype == np.uint16
    assert (expert_dtype(256), expert_dtype(257)) == (np.uint8, np.uint16)


def test_arrays_are_frozen():
    trace = RoutingTrace.from_samples(_samples(), num_experts=8)
    with pytest.raises(ValueError, match="read-only"):
        trace.experts_TLK[0, 0, 0] = 1


@given(traces(), st.data())
def test_select_gives_the_rows_of_the_samples(trace, data):
    chosen = data.draw(st.lists(st.integers(0, trace.num_samples - 1), max_size=4))
    picked = trace.select(chosen)
    picked.validate()
    assert picked.num_samples == len(chosen)
    for position, sample in enumerate(chosen):
        ours, theirs = picked.sample_rows(position), trace.sample_rows(sample)
        assert np.array_equal(picked.experts_TLK[ours], trace.experts_TLK[theirs])
        assert np.array_equal(picked.valid_T[ours], trace.valid_T[theirs])
        assert picked.sample_ids[position] == trace.sample_ids[sample]


@given(traces())
def test_neighbouring_samples_are_views(trace):
    if trace.num_rows:
        assert np.shares_memory(trace.select(range(trace.num_samples)).experts_TLK, trace.experts_TLK)


@given(traces())
def test_concatenate_undoes_select(trace):
    pieces = [trace.select([s]) for s in range(trace.num_samples)]
    assert_same(concatenate(pieces), trace)


def test_concatenate_refuses_other_models():
    one = RoutingTrace.from_samples(_samples(), num_experts=8)
    with pytest.raises(TraceError, match="trace 1 has num_experts 9, trace 0 has 8"):
        concatenate([one, RoutingTrace.from_samples(_samples(), num_experts=9)])
    with pytest.raises(TraceError, match="layers"):
        concatenate([one, RoutingTrace.from_samples(_samples(), num_experts=8, layer_ids=[3, 4])])
    with pytest.raises(TraceError, match="no traces"):
        concatenate([])


def test_a_hash_survives_concatenation_only_if_all_have_one():
    tokens = [np.arange(4), np.arange(3)]
    hashed = RoutingTrace.from_samples(_samples(), num_experts=8, tokens=tokens)
    plain = RoutingTrace.from_samples(_samples(), num_experts=8)
    assert concatenate([hashed, hashed]).token_hash_T is not None
    assert concatenate([hashed, plain]).token_hash_T is None


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8])
def test_faults_name_sample_row_and_layer(dtype):
    experts = [array.astype(dtype) for array in _samples()]
    experts[1][2, 1] = [3, 3]
    with pytest.raises(TraceError, match=r"sample 77, row 2, layer 9: expert ids \[3, 3\]"):
        RoutingTrace.from_samples(experts, num_experts=8, sample_ids=[5, 77], layer_ids=[4, 9])
    experts[1][2, 1] = [3, 8]
    with pytest.raises(TraceError, match=r"sample \d+, row 2, layer 9: expert id.* range 0\.\.7"):
        RoutingTrace.from_samples(experts, num_experts=8, sample_ids=[5, 77], layer_ids=[4, 9])


def test_negative_fillers_are_fine_on_invalid_rows_only():
    experts = [array.astype(np.int16) for array in _samples()]
    experts[0][3] = -1
    valid = [np.array([True, True, True, False]), np.ones(3, bool)]
    trace = RoutingTrace.from_samples(experts, num_experts=8, valid=valid)
    assert trace.valid_T.tolist() == [True, True, True, False, True, True, True]
    with pytest.raises(TraceError, match=r"row 3, layer 0: expert ids \[-1, -1\]"):
        RoutingTrace.from_samples(experts, num_experts=8)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(TraceError, match="sample 1 has routes of type int64 and shape"):
        RoutingTrace.from_samples([_samples()[0], _samples(L=3)[1]], num_experts=8)
    with pytest.raises(TraceError, match=r"'valid' and 'experts' disagree .* sample 1"):
        RoutingTrace.from_samples(_samples(), num_experts=8, valid=[np.ones(4, bool), np.ones(2, bool)])
    with pytest.raises(TraceError, match="at least one sample"):
        RoutingTrace.from_samples([], num_experts=8)
    with pytest.raises(TraceError, match="sample 0 has a prompt of 5 rows"):
        RoutingTrace.from_samples(_samples(), num_experts=8, prompt_lengths=[5, 0])
    with pytest.raises(TraceError, match="ascending layer"):
        RoutingTrace.from_samples(_samples(), num_experts=8, layer_ids=[4, 4])
    with pytest.raises(TraceError, match="3 choices fit into 2 experts"):
        RoutingTrace.from_samples([np.zeros((1, 1, 3), np.uint8)], num_experts=2)
    with pytest.raises(TraceError, match="position"):
        RoutingTrace.from_samples(_samples(), num_experts=8).select([2])


def first_illegal_row_reference(experts_TLK, valid_T, num_experts):
    """Do the same as `first_illegal_row` with Python sets."""
    for t in np.flatnonzero(valid_T).tolist():
        for layer, ids in enumerate(experts_TLK[t].tolist()):
            for k, expert in enumerate(ids):
                if expert >= num_experts:
                    return t, layer, 1
                if expert in ids[:k]:
                    return t, layer, 2
    return 0, 0, 0


@given(traces(num_experts=5), st.data())
def test_fault_search_equals_its_reference(trace, data):
    experts_TLK = trace.experts_TLK.copy()
    if experts_TLK.size and data.draw(st.booleans()):
        where = tuple(data.draw(st.integers(0, n - 1)) for n in experts_TLK.shape)
        experts_TLK[where] = data.draw(st.integers(0, 7))
    ours = first_illegal_row(experts_TLK, trace.valid_T, 5)
    assert ours == first_illegal_row_reference(experts_TLK, trace.valid_T, 5)


@given(st.lists(st.integers(0, 200_000), min_size=2, max_size=50))
def test_hash_depends_on_token_and_position(tokens):
    tokens_n = np.array(tokens)
    hashed_n = hash_tokens(tokens_n)
    assert hashed_n.tolist() == [hash_tokens(tokens_n[: i + 1])[i] for i in range(len(tokens))]


def test_a_shifted_sample_hashes_differently_nearly_everywhere():
    tokens_n = np.random.default_rng(0).integers(150_000, size=2000)
    assert (hash_tokens(tokens_n)[1:] == hash_tokens(tokens_n[1:])).mean() < 0.005


def test_dense_layers_of_an_engine_are_dropped_on_import():
    """Engines report every decoder layer; dense ones come as zeros, which no router could have chosen."""
    reported = [np.concatenate([np.zeros((4, 1, 2), np.int64), _samples(rows=(4,))[0]], axis=1)]
    with pytest.raises(TraceError, match=r"layer 0: expert ids \[0, 0\]"):
        RoutingTrace.from_samples(reported, num_experts=8)
    trace = RoutingTrace.from_samples(reported, num_experts=8, moe_layers=[1, 2])
    assert trace.layer_ids.tolist() == [1, 2]
    assert np.array_equal(trace.experts_TLK, reported[0][:, 1:])
    with pytest.raises(TraceError, match="moe_layers"):
        RoutingTrace.from_samples(reported, num_experts=8, moe_layers=[1, 3])


def test_values_of_the_wrong_kind_are_refused():
    trace = RoutingTrace.from_samples(_samples(), num_experts=8, valid=[np.array([1, 1, 1, 0]), np.ones(3, int)])
    assert trace.valid_T.dtype == bool
    with pytest.raises(TraceError, match="for a mask pass"):
        trace.select([True, False])
    with pytest.raises(TraceError, match="expected integers"):
        RoutingTrace.from_samples([array + 0.5 for array in _samples()], num_experts=8)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_offsets_that_wrap_around_are_refused(inner):
    trace = RoutingTrace.from_samples(_samples(rows=(5,)), num_experts=8)
    offsets = np.array([0, *inner, 5], dtype=np.int64)
    names = ("sample_ids", "group_ids", "prompt_lengths", "weight_versions")
    forged = replace(trace, offsets=offsets, **{name: np.zeros(len(offsets) - 1, np.int64) for name in names})
    if [0, *inner, 5] == sorted([0, *inner, 5]):
        forged.validate()
    else:
        with pytest.raises(TraceError, match="offsets"):
            forged.validate()
