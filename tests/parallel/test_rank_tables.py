"""Tables of all ranks fit together: what one sends is what another expects, and all of it is what the plan says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from relibra.parallel.rank_tables import rank_tables
from tests.planning.plans import planned_step, planned_steps


def all_tables(plan, demand):
    """Yield (micro-batch, layer, tables of every rank)."""
    M, L, R, _ = plan.replica_MLRB.shape
    for m in range(M):
        for layer in range(L):
            yield m, layer, [rank_tables(plan, demand, rank, m, layer) for rank in range(R)]


@given(planned_steps(max_slots=3))
def test_what_one_rank_sends_another_expects_and_all_is_what_the_plan_says(step):
    plan, demand = step
    load_MLR = plan.rank_load(demand)
    for m, layer, tables_R in all_tables(plan, demand):
        for source, sending in enumerate(tables_R):
            for target, receiving in enumerate(tables_R):
                assert sending.send_RP[target].tolist() == receiving.receive_RP[source].tolist()
        assert [int(t.receive_RP.sum()) for t in tables_R] == load_MLR[m, layer].tolist()
        assert [t.tokens_E.tolist() for t in tables_R] == demand.tokens_MLRE[m, layer].tolist()
        assert all(t.pushes == tables_R[0].pushes for t in tables_R)


@given(planned_steps())
def test_every_token_slot_reaches_a_slot_that_holds_its_expert(step):
    """Move labels through the tables as the executor moves rows."""
    plan, demand = step
    for m, layer, tables_R in all_tables(plan, demand):
        expert_RP = experts_in_slots(plan, m, layer)
        bins_RR = []
        for tables in tables_R:
            experts_X = np.repeat(np.arange(plan.num_experts), tables.tokens_E)[tables.send_order_X]
            assert sorted(tables.send_order_X) == list(range(len(experts_X)))
            bins_RR.append(np.split(experts_X, np.cumsum(tables.send_RP.sum(axis=1))[:-1]))
        for rank, tables in enumerate(tables_R):
            arrived_Y = np.concatenate([bins_R[rank] for bins_R in bins_RR])
            assert (arrived_Y[tables.compute_order_Y] == expert_RP[rank][tables.slot_Y]).all()
            assert (np.diff(tables.slot_Y) >= 0).all()
            assert tables.num_home_rows == (tables.slot_Y < tables.num_homes).sum()


@given(planned_steps())
def test_pushes_fill_exactly_the_slots_that_compute(step):
    plan, demand = step
    for m, layer, tables_R in all_tables(plan, demand):
        expert_RP = experts_in_slots(plan, m, layer)
        pushes = tables_R[0].pushes
        for push in pushes:
            assert expert_RP[push.home, push.home_slot] == expert_RP[push.replica, tables_R[0].num_homes + push.slot]
            assert push.home != push.replica
        busy = [(r, b) for r, t in enumerate(tables_R) for b in np.unique(t.slot_Y - t.num_homes).tolist() if b >= 0]
        assert [(push.replica, push.slot) for push in pushes] == busy


def experts_in_slots(plan, m, layer):
    """Expert in each local slot of each rank; -1: empty."""
    homes_RP = plan.physical_to_logical_map[layer].reshape(plan.num_ranks, -1)
    return np.concatenate([homes_RP, plan.replica_MLRB[m, layer]], axis=1)


def test_tables_need_a_schedule():
    plan, demand = planned_step(np.random.default_rng(0))
    with pytest.raises(AssertionError, match=r"plan\.scheduled"):
        rank_tables(plan, replace(demand, tokens_MLRE=None), 0, 0, 0)
