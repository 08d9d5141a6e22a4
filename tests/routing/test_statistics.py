import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relibra import ClusterError
from relibra.routing.statistics import (
    co_activation,
    contiguous_homes,
    max_vio,
    rank_load,
    rank_skew,
    skew,
)
from tests.routing.slow_statistics import cosine_to_mean, fluctuation
from tests.routing.traces import traces

loads = hnp.arrays(np.int64, hnp.array_shapes(min_dims=3, max_dims=3, max_side=6), elements=st.integers(0, 1000))


@given(loads, st.data())
def test_rank_load_adds_up_the_experts_of_a_rank(load_MLE, data):
    E = load_MLE.shape[-1]
    ranks = data.draw(st.integers(1, 4))
    home_E = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=E, max_size=E)))
    result = rank_load(load_MLE, home_E, ranks)
    for rank in range(ranks):
        assert np.array_equal(result[..., rank], load_MLE[..., home_E == rank].sum(axis=-1))


@given(loads)
def test_skew_is_max_over_mean(load_MLE):
    for m, layer in np.ndindex(load_MLE.shape[:2]):
        load = load_MLE[m, layer].tolist()
        expected = max(load) / (sum(load) / len(load)) if sum(load) else 1.0
        assert skew(load_MLE)[m, layer] == pytest.approx(expected)
        assert max_vio(load_MLE)[m, layer] == pytest.approx(expected - 1)


def test_hand_made_figures():
    load_MLE = np.array([[[4, 0, 2, 2]], [[0, 4, 2, 2]]])
    assert rank_skew(load_MLE, 2).tolist() == [[1.0], [1.0]]
    assert rank_skew(load_MLE, 4).tolist() == [[2.0], [2.0]]
    assert skew(load_MLE.sum(axis=0)).tolist() == [1.0]
    # dot([4,0,2,2],[4,4,4,4]) / (sqrt(24) * 8)
    np.testing.assert_allclose(cosine_to_mean(load_MLE), 32 / (np.sqrt(24) * 8))
    # shares 0.5/0, 0/0.5, 0.25, 0.25: deviations 0.25, 0.25, 0, 0 over a mean share of 1 in all
    np.testing.assert_allclose(fluctuation(load_MLE), [0.5])


def test_ranks_have_to_divide_the_experts():
    with pytest.raises(ClusterError, match=r"12 experts .* 8 ranks"):
        contiguous_homes(12, 8)
    with pytest.raises(ClusterError, match="0 ranks"):
        contiguous_homes(12, 0)


@given(traces())
def test_co_activation_counts_pairs(trace):
    expected = np.zeros((trace.num_layers, trace.num_experts, trace.num_experts), dtype=np.int64)
    for row in np.flatnonzero(trace.valid_T):
        for layer in range(trace.num_layers):
            for e in trace.experts_TLK[row, layer].tolist():
                for f in trace.experts_TLK[row, layer].tolist():
                    expected[layer, e, f] += 1
    assert np.array_equal(co_activation(trace), expected)
