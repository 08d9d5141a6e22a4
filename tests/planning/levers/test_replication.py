"""Replicas: never worse, close to the exact optimum, and legal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.replication_milp import replicate_milp
from relibra.planning.levers.replication import replicate
from tests.planning.levers.incremental_greedy import replicate_incrementally
from tests.planning.splits import rank_load


@st.composite
def layers(draw):
    nodes, ranks, per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    E = nodes * ranks * per_rank
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sigma = draw(st.sampled_from([0.0, 0.5, 1.5, 4.0]))
    load_ME = rng.poisson(rng.lognormal(3, sigma, (draw(st.integers(1, 3)), E))).astype(np.int64)
    load_ME[:, rng.random(E) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    home_E = rng.permutation(np.repeat(np.arange(nodes * ranks), per_rank))
    return load_ME, home_E, nodes * ranks, ranks


@given(layers(), st.integers(0, 3), st.sampled_from([0.0, 0.01, 0.2]), st.booleans())
def test_legal_and_never_worse(layer, slots, tolerance, cross_node):
    load_ME, home_E, num_ranks, ranks_per_node = layer
    replica_MRB, quota_MRB = replicate(
        load_ME, home_E, num_ranks, ranks_per_node, slots=slots, tolerance=tolerance, cross_node=cross_node
    )
    for load_E, replica_RB, quota_RB in zip(load_ME, replica_MRB, quota_MRB, strict=True):
        before = np.bincount(home_E, weights=load_E, minlength=num_ranks).max()
        after = rank_load(load_E, home_E, replica_RB, quota_RB).max()
        assert after <= before
        rank, slot = np.nonzero(replica_RB >= 0)
        home = home_E[replica_RB[rank, slot]]
        if len(rank):
            assert after < before
        if not cross_node:
            assert (home // ranks_per_node == rank // ranks_per_node).all()


@given(layers())
def test_one_expert_and_one_slot_per_rank_is_always_exact(layer):
    """Walker's alias table: with a single expert at home everywhere, chains reach the mean whatever the loads are."""
    load_ME, _, num_ranks, _ = layer
    load_ME = np.ascontiguousarray(load_ME[:, :num_ranks])
    home_E = np.arange(num_ranks)
    replica_MRB, quota_MRB = replicate(load_ME, home_E, num_ranks, num_ranks, slots=1)
    for load_E, replica_RB, quota_RB in zip(load_ME, replica_MRB, quota_MRB, strict=True):
        assert rank_load(load_E, home_E, replica_RB, quota_RB).max() == -(-load_E.sum() // num_ranks)


@pytest.mark.parametrize(("slots", "mean_ratio"), [(1, 1.01), (2, 1.003)])
def test_close_to_the_exact_optimum(slots, mean_ratio):
    rng = np.random.default_rng(3)
    ratios, greedy = [], []
    for case in range(15):
        per_rank = 1 + case % 4
        popularity = rng.lognormal(0, [0.5, 0.8, 1.2][case % 3], 6 * per_rank)
        load_E = rng.multinomial(20_000, popularity / popularity.sum())
        home_E = np.repeat(np.arange(6), per_rank)
        optimum = replicate_milp(load_E, home_E, 6, slots)
        [replica_RB], [quota_RB] = replicate(load_E[None], home_E, 6, 6, slots=slots)
        ratios.append(rank_load(load_E, home_E, replica_RB, quota_RB).max() / optimum)
        replica_RB, quota_RB = replicate_incrementally(load_E, home_E, 6, slots=slots)
        greedy.append(rank_load(load_E, home_E, replica_RB, quota_RB).max() / optimum)
    assert min(ratios) >= 1 - 1e-6
    assert np.mean(ratios) <= mean_ratio
    assert np.mean(ratios) <= np.mean(greedy)


def test_cross_node_copies_reach_the_mean_of_the_cluster():
    load_E = np.array([400, 300, 200, 100, 10, 10, 10, 10], dtype=np.int64)  # one heavy, one light node
    home_E = np.repeat(np.arange(4), 2)
    tops = {}
    for cross_node in (False, True):
        [replica_RB], [quota_RB] = replicate(load_E[None], home_E, 4, 2, slots=1, cross_node=cross_node)
        tops[cross_node] = rank_load(load_E, home_E, replica_RB, quota_RB).max()
    assert tops == {False: 500, True: 260}


def test_tolerance_saves_copies():
    rng = np.random.default_rng(5)
    load_ME = rng.poisson(rng.lognormal(6, 0.8, (8, 64))).astype(np.int64)
    home_E = np.repeat(np.arange(16), 4)
    copies, skews = [], []
    for tolerance in (0.0, 0.01, 0.05):
        replica, quota = replicate(load_ME, home_E, 16, 16, slots=2, tolerance=tolerance)
        copies.append((replica >= 0).sum())
        tops = [rank_load(*case).max() for case in zip(load_ME, [home_E] * 8, replica, quota, strict=True)]
        skews.append(sum(tops) / load_ME.sum() * 16)
    assert copies == sorted(copies, reverse=True)
    assert copies[0] > copies[-1]
    assert all(skew <= 1 + tolerance + 0.001 for skew, tolerance in zip(skews, (0.0, 0.01, 0.05), strict=True))
