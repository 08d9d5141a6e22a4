import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra import ConfigError
from relibra.routing.statistics import rank_skew
from relibra.routing.synthetic import SKEW_TOLERANCE, TraceShape, balanced_trace, demo_demand, domain_trace, zipf_trace
from tests.routing.slow_statistics import cosine_to_mean, micro_batch_load
from tests.routing.traces import assert_same

SHAPE = TraceShape(rows_per_sample=[256] * 32, num_layers=3, num_experts=64, top_k=6)


@pytest.mark.parametrize(("ranks", "wanted"), [(8, 1.25), (8, 1.5), (8, 2.0), (8, 4.0), (8, 6.0), (2, 1.25), (32, 3.0)])
def test_zipf_delivers_the_rank_skew_asked_for(ranks, wanted):
    trace = zipf_trace(SHAPE, np.random.default_rng(0), rank_skew=wanted, num_ranks=ranks)
    measured = rank_skew(micro_batch_load(trace, trace.num_rows), ranks).mean()
    assert measured == pytest.approx(wanted, rel=SKEW_TOLERANCE)


@pytest.mark.parametrize("wanted", [0.5, 1.0, 8.0, 10.7])
def test_zipf_refuses_a_skew_nobody_can_have(wanted):
    with pytest.raises(ConfigError, match="between 1 and 8"):
        zipf_trace(SHAPE, np.random.default_rng(0), rank_skew=wanted, num_ranks=8)


def test_zipf_says_when_chance_outweighs_the_request():
    shape = TraceShape(rows_per_sample=[20], num_layers=4, num_experts=64, top_k=2)
    with pytest.raises(ConfigError, match="20 tokens gave 3"):
        zipf_trace(shape, np.random.default_rng(0), rank_skew=1.02, num_ranks=32)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.data())
def test_balanced_loads_every_expert_alike(experts, data):
    top_k = data.draw(st.integers(1, experts))
    shape = TraceShape(rows_per_sample=[experts, 2 * experts], num_layers=2, num_experts=experts, top_k=top_k)
    load = micro_batch_load(balanced_trace(shape), experts)
    assert (load == top_k).all()


def test_domains_have_hot_experts_of_their_own_that_drift():
    trace = domain_trace(SHAPE, np.random.default_rng(0), num_domains=2, drift=1.0)
    still = domain_trace(SHAPE, np.random.default_rng(0), num_domains=2, drift=0.0)

    def likeness(trace, first, second):
        """Cosine between the loads of two samples."""
        return cosine_to_mean(micro_batch_load(trace.select(np.array([first, second])), 256)).mean()

    same = np.flatnonzero(trace.group_ids == trace.group_ids[0])
    other = np.flatnonzero(trace.group_ids != trace.group_ids[0])
    assert likeness(trace, same[0], same[1]) > likeness(trace, same[0], same[-1]) + 0.05
    assert likeness(still, same[0], same[-1]) > 0.97
    assert likeness(still, same[0], same[1]) > likeness(still, same[0], other[0]) + 0.05


def test_same_generator_same_bytes():
    for make in (domain_trace, lambda shape, rng: zipf_trace(shape, rng, rank_skew=2.0, num_ranks=8)):
        assert_same(make(SHAPE, np.random.default_rng(7)), make(SHAPE, np.random.default_rng(7)))


def test_impossible_shapes():
    with pytest.raises(ConfigError, match="3 different experts of 2"):
        TraceShape(rows_per_sample=[1], num_layers=1, num_experts=2, top_k=3)
    with pytest.raises(ConfigError, match="needs layers and samples"):
        TraceShape(rows_per_sample=[], num_layers=1, num_experts=2, top_k=1)


def test_demo_demand_is_a_full_step_with_skewed_ranks():
    demand = demo_demand(8, rank_tokens=64, num_micro_batches=3, num_layers=2)
    demand.validate()
    assert demand.tokens_MLRE.shape == (3, 2, 8, 64)
    assert (demand.tokens_MLRE.sum(axis=3) == 64 * 4).all()
    assert rank_skew(demand.load_MLE, 8).min() > 1.2
    again = demo_demand(8, rank_tokens=64, num_micro_batches=3, num_layers=2)
    assert demand.digest() == again.digest() != demo_demand(8, rank_tokens=64, num_micro_batches=3, seed=1).digest()


@pytest.mark.parametrize("sizes", [{"num_ranks": 0}, {"rank_tokens": 6}, {"num_micro_batches": 0}, {"num_layers": 0}])
def test_demo_demand_refuses_sizes_that_make_no_step(sizes):
    with pytest.raises(ConfigError):
        demo_demand(**sizes)
