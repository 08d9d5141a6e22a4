import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra import ConfigError
from relibra.routing.statistics import rank_skew
from relibra.routing.synthetic import TraceShape, demo_demand, domain_trace
from tests.routing.slow_statistics import cosine_to_mean, micro_batch_load
from tests.routing.traces import assert_same, balanced_trace

SHAPE = TraceShape(rows_per_sample=[256] * 32, num_layers=3, num_experts=64, top_k=6)


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

    assert_same(domain_trace(SHAPE, np.random.default_rng(0), num_domains=2, drift=0.0), still)
    same = np.flatnonzero(trace.group_ids == trace.group_ids[0])
    other = np.flatnonzero(trace.group_ids != trace.group_ids[0])
    assert likeness(trace, same[0], same[1]) > likeness(trace, same[0], same[-1]) + 0.05
    assert likeness(still, same[0], same[-1]) > 0.97
    assert likeness(still, same[0], same[1]) > likeness(still, same[0], other[0]) + 0.05


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
