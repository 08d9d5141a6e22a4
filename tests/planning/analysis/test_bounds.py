"""Bounds: never above what exhaustive search reaches."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.replication_milp import replicate_milp
from relibra.planning.analysis.bounds import any_homes_bound, reachable_bound
from relibra.planning.levers.replication import replicate
from tests.planning.splits import rank_load


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.integers(1, 2), st.sampled_from([0.5, 2.0]))
def test_reachable_bound_is_below_the_exact_optimum(seed, per_rank, slots, sigma):
    rng = np.random.default_rng(seed)
    load_E = rng.poisson(rng.lognormal(4, sigma, 4 * per_rank)).astype(np.int64)
    home_E = np.repeat(np.arange(4), per_rank)
    bound = reachable_bound(load_E[None, None], home_E[None], 4, 4, slots, "node")[0, 0]
    assert bound <= np.ceil(replicate_milp(load_E, home_E, 4, slots) - 1e-6)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 1), (2, 2), (1, 3)]), st.integers(0, 1))
def test_no_homes_get_below_any_homes_bound(seed, machine, slots):
    nodes, ranks = machine
    R = nodes * ranks
    rng = np.random.default_rng(seed)
    load_E = rng.poisson(rng.lognormal(3, 1.5, 6 if R == 3 else 4)).astype(np.int64)
    if len(load_E) % R:
        return
    bound = any_homes_bound(load_E[None, None], R, ranks, slots, "node")[0, 0]
    tops = []
    for home in set(permutations(np.repeat(np.arange(R), len(load_E) // R).tolist())):
        home_E = np.array(home)
        reachable = reachable_bound(load_E[None, None], home_E[None], R, ranks, slots, "node")[0, 0]
        tops.append(reachable)
        assert bound <= reachable
    assert bound <= min(tops)


def test_slots_limit_how_far_one_expert_spreads():
    load_E = np.array([800, 0, 0, 0], dtype=np.int64)
    home_E = np.arange(4)
    bounds = [reachable_bound(load_E[None, None], home_E[None], 4, 4, slots, "node")[0, 0] for slots in (0, 1)]
    assert bounds == [800, 200]
    two_nodes = reachable_bound(load_E[None, None], home_E[None], 4, 2, 1, "node")[0, 0]
    assert two_nodes == 400


@pytest.mark.parametrize("scope", ["node", "cluster"])
def test_bound_of_random_layers_is_reached_or_missed_from_above(scope):
    rng = np.random.default_rng(0)
    load_ME = rng.poisson(rng.lognormal(6, 1.0, (6, 32))).astype(np.int64)
    home_E = rng.permutation(np.repeat(np.arange(8), 4))
    bound_M = reachable_bound(load_ME[:, None], home_E[None], 8, 4, 1, scope)[:, 0]
    replica, quota = replicate(load_ME, home_E, 8, 4, slots=1, cross_node=scope == "cluster")
    for m in range(6):
        assert bound_M[m] <= rank_load(load_ME[m], home_E, replica[m], quota[m]).max() <= 1.02 * bound_M[m]
