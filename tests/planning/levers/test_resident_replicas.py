"""Resident replicas: legal, as even as their slots allow, few pushes, the same for every group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.levers.replication import replicate
from relibra.planning.levers.resident_replicas import keep_replicas
from tests.planning.splits import lowest_busiest_rank, rank_load


def pushes(replica_MRB, group_M=None):
    """Count the experts that come to a rank which did not hold them in the micro-batch before."""
    count = 0
    for m in range(len(replica_MRB)):
        for r, held_B in enumerate(replica_MRB[m]):
            same_group = m > 0 and (group_M is None or group_M[m] == group_M[m - 1])
            before = set(replica_MRB[m - 1, r]) if same_group else set()
            count += len(set(held_B) - before - {-1})
    return count


@st.composite
def layers(draw):
    nodes, per_node, per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    R, E, M = nodes * per_node, nodes * per_node * per_rank, draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sigma = draw(st.sampled_from([0.0, 0.5, 1.5, 4.0]))
    source_MNE = rng.poisson(rng.lognormal(3, sigma, E), (M, nodes, E)).astype(np.int64)
    source_MNE[:, :, rng.random(E) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    home_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    group_M = np.sort(rng.integers(0, draw(st.integers(1, 3)), M))
    return source_MNE, home_E, R, per_node, group_M


@given(layers(), st.integers(0, 3), st.sampled_from([0.0, 0.01, 0.2]), st.booleans(), st.data())
def test_legal_and_as_even_as_the_slots_allow(layer, slots, tolerance, cross_node, data):
    source_MNE, home_E, R, G, group_M = layer
    load_ME = source_MNE.sum(axis=1)
    traffic_slots = data.draw(st.integers(0, slots))
    local = {"source_MXE": source_MNE, "traffic_slots": traffic_slots} if data.draw(st.booleans()) else {}
    options = {"slots": slots, "tolerance": tolerance, "cross_node": cross_node, **local}
    replica_MRB, quota_MRB = keep_replicas(load_ME, home_E, R, G, group_M=group_M, **options)
    for load_E, replica_RB, quota_RB in zip(load_ME, replica_MRB, quota_MRB, strict=True):
        top, before = (
            rank_load(load_E, home_E, replica_RB, quota_RB, idle=True).max(),
            np.bincount(home_E, load_E, R).max(),
        )
        mean = load_E.sum() / R
        fullest = 0.0 if cross_node else np.bincount(home_E // G, load_E).max() / G
        ceiling = max(1, np.ceil(mean * (1 + tolerance)), np.ceil(fullest * (1 + tolerance / 4)))
        if not local:
            assert top <= max(before, 1)
            assert top <= max(ceiling, np.ceil(lowest_busiest_rank(load_E, home_E, replica_RB) - 1e-6))
            if not cross_node:
                rank, slot = np.nonzero(replica_RB >= 0)
                assert (home_E[replica_RB[rank, slot]] // G == rank // G).all()
    again = keep_replicas(load_ME, home_E, R, G, group_M=group_M, **options)
    assert (again[0] == replica_MRB).all()
    assert (again[1] == quota_MRB).all()
    for group in np.unique(group_M):  # nothing stays from one group to the next
        of = group_M == group
        alone = {**options, "source_MXE": source_MNE[of]} if local else options
        replica_mRB, quota_mRB = keep_replicas(load_ME[of], home_E, R, G, **alone)
        assert (replica_mRB == replica_MRB[of]).all()
        assert (quota_mRB == quota_MRB[of]).all()


@pytest.mark.parametrize(("slots", "share"), [(1, 0.3), (2, 0.1)])
def test_popular_experts_are_pushed_once(slots, share):
    """Micro-batches of the same popularity need a small part of the pushes of shared slots."""
    rng = np.random.default_rng(1)
    load_ME = rng.poisson(rng.lognormal(6, 0.8, 64) * rng.lognormal(0, 0.1, (24, 64))).astype(np.int64)
    home_E = np.repeat(np.arange(16), 4)
    replica_MRB, quota_MRB = keep_replicas(load_ME, home_E, 16, 8, slots=slots, tolerance=0.01, cross_node=True)
    shared_MRB, _ = replicate(load_ME, home_E, 16, 8, slots=slots, tolerance=0.01, cross_node=True)
    tops = [
        rank_load(*case, idle=True).max() for case in zip(load_ME, [home_E] * 24, replica_MRB, quota_MRB, strict=True)
    ]
    assert sum(tops) <= 1.012 * load_ME.sum() / 16
    assert pushes(replica_MRB) <= share * (shared_MRB >= 0).sum()


def test_slots_for_traffic_hold_what_a_node_wants_most():
    source_MNE = np.zeros((3, 2, 8), dtype=np.int64)
    source_MNE[:, 0] = [10, 10, 10, 10, 1, 50, 2, 3]
    source_MNE[:, 1] = [20, 1, 2, 30, 10, 10, 10, 10]
    source_MNE[1] += 5
    home_E = np.arange(8) // 2
    replica_MRB, quota_MRB = keep_replicas(
        source_MNE.sum(axis=1), home_E, 4, 2, slots=1, tolerance=9.0, source_MXE=source_MNE, traffic_slots=1
    )
    assert (replica_MRB == replica_MRB[0]).all()
    assert sorted(replica_MRB[0, :2].ravel()) == [5, 7]
    assert sorted(replica_MRB[0, 2:].ravel()) == [0, 3]
    for m in range(3):
        for r in range(4):
            assert quota_MRB[m, r, 0] == source_MNE[m, r // 2, replica_MRB[m, r, 0]]


def test_held_experts_stay_in_slots_for_traffic():
    source_MNE = np.random.default_rng(0).integers(1, 50, (4, 2, 8))
    home_E, held_RB = np.arange(8) // 2, np.array([[4, 2], [6, 5], [0, 1], [3, 2]])
    replica_MRB, _ = keep_replicas(
        source_MNE.sum(axis=1), home_E, 4, 2, slots=2, tolerance=0.0, cross_node=True, group_M=np.arange(4) // 2,
        source_MXE=source_MNE, traffic_slots=1, held_RB=held_RB,
    )  # fmt: skip
    assert ((replica_MRB == held_RB) | (replica_MRB == -1)).all()


def test_no_load_and_no_micro_batch():
    home_E = np.arange(4)
    for M in (0, 2):
        replica_MRB, quota_MRB = keep_replicas(np.zeros((M, 4), dtype=int), home_E, 4, 2, slots=1, tolerance=0.0)
        assert replica_MRB.shape == quota_MRB.shape == (M, 4, 1)
        assert (replica_MRB == -1).all()
