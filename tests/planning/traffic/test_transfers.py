"""Transfers: every replica is loaded before use, and no schedule loads less."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import PlanError
from relibra.planning.budget import Budget
from relibra.planning.planner import plan_step
from relibra.planning.traffic.transfers import FROM_POOL, count_loads_reference, list_transfers, place_in_resident_slots
from tests.planning.cases import cluster, make_demand


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 2))
def test_known_future_loads_as_little_as_an_exhaustive_search(seed, wanted, extra):
    rng = np.random.default_rng(seed)
    replica_MLRB = np.full((6, 1, 2, wanted), -1, dtype=np.int16)
    for m in range(6):
        for r in range(2):
            some = rng.permutation(5)[: rng.integers(wanted + 1)]
            replica_MLRB[m, 0, r, : len(some)] = some
    slot_MLRB, load_MLRB = place_in_resident_slots(replica_MLRB, wanted + extra)
    held = np.full((2, wanted + extra), -1)
    for m in range(6):
        for r in range(2):
            needed = replica_MLRB[m, 0, r] >= 0
            assert (slot_MLRB[m, 0, r][~needed] == -1).all()
            used = slot_MLRB[m, 0, r][needed]
            assert len(set(used.tolist())) == len(used)
            for b in np.flatnonzero(needed):
                if load_MLRB[m, 0, r, b]:
                    held[r, slot_MLRB[m, 0, r, b]] = replica_MLRB[m, 0, r, b]
            assert (held[r, used] == replica_MLRB[m, 0, r][needed]).all()
    assert (load_MLRB.sum(axis=(0, 3)) == count_loads_reference(replica_MLRB, wanted + extra)).all()


@pytest.fixture(scope="module")
def planned():
    demand = make_demand(24, 3, 16, 6, 8, 0)
    machine = cluster(2, 4)
    plan = plan_step(demand, machine, Budget(slots=1, objective="tokens", cross_node_copies=True))
    return plan, machine


def test_a_ring_pushes_every_replica_from_its_home_or_from_a_pool(planned):
    plan, _ = planned
    transfers = list_transfers(plan, residency="ring")
    assert transfers.num_transfers == plan.num_copies
    order = transfers.micro_batch_X * 1000 + transfers.layer_X
    assert (np.diff(order) >= 0).all()
    home_X = plan.home_LE[transfers.layer_X, transfers.expert_X]
    assert (home_X // 4 != transfers.rank_X // 4).any()
    assert (transfers.source_X == home_X).all()
    assert (list_transfers(plan, residency="ring", pool=True).source_X == FROM_POOL).all()


def test_residency_saves_pushes(planned):
    plan, _ = planned
    counts = [list_transfers(plan, residency="resident", slots=slots).num_transfers for slots in (1, 2, 4)]
    assert plan.num_copies >= counts[0] >= counts[1] >= counts[2]
    assert counts[2] < plan.num_copies


def test_missing_slots_get_a_sentence(planned):
    plan, _ = planned
    with pytest.raises(PlanError, match="0 physical slots"):
        list_transfers(plan, residency="resident", slots=0)
