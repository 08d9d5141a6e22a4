import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.deployment.node_costs import node_costs
from relibra import PlanError
from relibra.planning.deployment.expert_redundancy import place_copies


def skew(load_E, placed_NP, **more):
    costs_N = node_costs(load_E, placed_NP, **more)
    return costs_N.max() / costs_N.mean()


def zipf(exponent):
    return np.arange(1, 33) ** -exponent


@pytest.mark.parametrize(
    ("exponent", "slots", "ratio"),
    [(0.5, 1, 3.22), (0.5, 2, 1.02), (1.0, 1, 7.88), (1.0, 2, 1.09), (1.0, 3, 1.03), (1.2, 2, 1.15), (1.2, 3, 1.04)],
)
def test_skew_after_copies_is_that_computed_apart(exponent, slots, ratio):
    assert skew(zipf(exponent), place_copies(zipf(exponent), 32, slots)) == pytest.approx(ratio, abs=0.006)


@given(
    loads=st.lists(st.floats(0, 100), min_size=1, max_size=12), nodes=st.integers(1, 6), spare=st.integers(0, 3),
    cold=st.floats(0, 20),
)  # fmt: skip
def test_every_expert_has_a_place_and_no_node_has_one_twice(loads, nodes, spare, cold):
    slots = -(-len(loads) // nodes) + spare
    placed_NP = place_copies(np.array(loads), nodes, slots, cold)
    assert placed_NP.shape == (nodes, slots)
    for placed in placed_NP.tolist():
        held = [expert for expert in placed if expert >= 0]
        assert len(held) == len(set(held))
    assert set(placed_NP[placed_NP >= 0].tolist()) == set(range(len(loads)))
    assert node_costs(np.array(loads), placed_NP, cold).sum() >= sum(loads) * (1 - 1e-12)


def test_a_cold_expert_costs_what_its_weights_cost():
    load_E = np.array([10.0, 0.0, 0.0])
    placed_NP = np.array([[0, 1], [0, 2]])
    assert node_costs(load_E, placed_NP, 2.0).tolist() == [7.0, 7.0]
    assert node_costs(load_E, placed_NP, 8.0).tolist() == [16.0, 16.0]
    assert node_costs(load_E, placed_NP, 8.0, as_paper=True).tolist() == [13.0, 13.0]


def test_too_few_slots_are_refused():
    with pytest.raises(PlanError, match="give more slots"):
        place_copies(np.ones(5), 2, 2)


def test_copies_from_the_loads_before_hold_while_popularity_does():
    rng = np.random.default_rng(0)
    load_TE = rng.multinomial(100_000, zipf(1.0) / zipf(1.0).sum(), size=2)
    placed_NP = place_copies(load_TE[0], 32, 2)
    assert skew(load_TE[1], placed_NP) <= 1.15
