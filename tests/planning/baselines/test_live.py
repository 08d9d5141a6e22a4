"""Live: the same replicas inside a layer as in a comparison, legal, never worse, and close to the exact optimum."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.replication_milp import replicate_milp
from relibra.planning.baselines.live import TOLERANCE, solve_layer
from relibra.planning.registry import BALANCERS, find_balancer
from tests.planning.balancers.requests import ask, spread
from tests.planning.levers.test_replication import layers
from tests.planning.splits import rank_load


@given(layers(), st.integers(0, 3))
def test_a_layer_gets_the_replicas_that_a_comparison_shows(layer, slots):
    load_ME, home_E, num_ranks, ranks_per_node = layer
    previous_map = np.argsort(home_E, kind="stable")[None].astype(np.int16)
    nodes = num_ranks // ranks_per_node
    request = ask(
        spread(load_ME[:, None], num_ranks), nodes, slots=slots, tolerance=TOLERANCE, previous_map=previous_map
    )
    placement = BALANCERS["live"].decide(request)
    for m, load_E in reversed(list(enumerate(load_ME))):  # no layer depends on those before it
        replica_RB, quota_RB = solve_layer(load_E.astype(np.int32), home_E, num_ranks, ranks_per_node, slots=slots)
        assert np.array_equal(placement.replica_MLRB[m, 0], replica_RB)
        assert np.array_equal(placement.quota_MLRB[m, 0], quota_RB)


@given(layers(), st.integers(0, 3))
def test_legal_inside_nodes_and_never_worse(layer, slots):
    load_ME, home_E, num_ranks, ranks_per_node = layer
    replica_RB, quota_RB = solve_layer(load_ME[0], home_E, num_ranks, ranks_per_node, slots=slots)
    before_R = np.bincount(home_E, weights=load_ME[0], minlength=num_ranks)
    assert rank_load(load_ME[0], home_E, replica_RB, quota_RB).max() <= before_R.max()
    rank, slot = np.nonzero(replica_RB >= 0)
    assert (home_E[replica_RB[rank, slot]] // ranks_per_node == rank // ranks_per_node).all()


def test_close_to_the_exact_optimum():
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(8):
        load_E = rng.multinomial(20_000, rng.dirichlet(np.full(12, 0.8)))
        home_E = np.repeat(np.arange(4), 3)
        found = rank_load(load_E, home_E, *solve_layer(load_E, home_E, 4, 4, slots=1)).max()
        ratios.append(found / replicate_milp(load_E, home_E, 4, 1))
    assert min(ratios) >= 1 - 1e-6
    assert max(ratios) <= 1 + TOLERANCE + 1e-3


def test_its_decisions_are_priced_as_live_ones():
    assert find_balancer("live").sees == "live"
    assert find_balancer("relibra").sees != "live"
