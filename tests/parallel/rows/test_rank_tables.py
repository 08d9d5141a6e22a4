"""Tables of all ranks fit together: what one sends is what another expects, and all of it is what the plan says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.traffic.rank_tables import Place, home_tables, rank_tables
from tests.planning.plans import planned_steps


def all_tables(plan, demand):
    """Yield (micro-batch, layer, tables of every rank)."""
    M, L, R, _ = plan.replica_MLRB.shape
    for m in range(M):
        for layer in range(L):
            yield m, layer, [rank_tables(plan, demand, rank, m, layer) for rank in range(R)]


@given(planned_steps(max_slots=3))
def test_ranks_expect_what_others_send_as_the_plan_says(step):
    plan, demand = step
    load_MLR = plan.rank_load(demand)
    for m, layer, tables_R in all_tables(plan, demand):
        for source, sending in enumerate(tables_R):
            for target, receiving in enumerate(tables_R):
                assert sending.send_RP[target].tolist() == receiving.receive_RP[source].tolist()
        assert [int(t.receive_RP.sum()) for t in tables_R] == load_MLR[m, layer].tolist()
        assert [t.tokens_E.tolist() for t in tables_R] == demand.tokens_MLRE[m, layer].tolist()
        assert all(t.pushes == tables_R[0].pushes for t in tables_R)
        G, R = plan.ranks_per_node, plan.num_ranks
        sent = [(s, d) for s, t in enumerate(tables_R) for d in range(R) if t.send_RP[d].any()]
        assert {t.all_stay for t in tables_R} == {all(s == d for s, d in sent)}
        assert {t.stay_in_node for t in tables_R} == {all(s // G == d // G for s, d in sent)}
        assert {t.stay_on_rail for t in tables_R} == {all(s % G == d % G for s, d in sent)}


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
            assert push.expert == expert_RP[push.home, push.home_slot]
            column = tables_R[push.replica].receive_RP[:, tables_R[0].num_homes + push.slot]
            assert push.tokens == column.sum() > 0
            assert push.tokens == plan.quota_MLRB[m, layer, push.replica, push.slot]
        busy = [(r, b) for r, t in enumerate(tables_R) for b in np.unique(t.slot_Y - t.num_homes).tolist() if b >= 0]
        assert [(push.replica, push.slot) for push in pushes] == busy


@given(planned_steps(max_slots=3))
def test_each_rank_finds_its_own_pushes(step):
    for _, _, tables_R in all_tables(*step):
        pushes = tables_R[0].pushes
        from_here = [push for tables in tables_R for _, push in tables.pushes_from_here]
        to_here = [push for tables in tables_R for _, push in tables.pushes_to_here]
        assert sorted(from_here) == sorted(to_here) == sorted(pushes)
        assert all(pushes[n] == push for t in tables_R for n, push in t.pushes_from_here + t.pushes_to_here)


@given(planned_steps(max_slots=3), st.sampled_from([1, 2, 4, 128]))
def test_in_chunks_only_the_shares_change(step, chunk):
    plan, demand = step
    for m, layer, tables_R in all_tables(plan, demand):
        chunked_R = [rank_tables(plan, demand, rank, m, layer, chunk) for rank in range(plan.num_ranks)]
        for source, sending in enumerate(chunked_R):
            assert sending.send_RP.sum() == tables_R[source].send_RP.sum()
            for target, receiving in enumerate(chunked_R):
                assert sending.send_RP[target].tolist() == receiving.receive_RP[source].tolist()
        expert_RP = experts_in_slots(plan, m, layer)
        computed_E = np.zeros(plan.num_experts, dtype=int)
        for rank, tables in enumerate(chunked_R):
            np.add.at(computed_E, expert_RP[rank], tables.receive_RP.sum(axis=0))
        assert computed_E.tolist() == demand.tokens_MLRE[m, layer].sum(axis=0).tolist()
        for push in chunked_R[0].pushes:
            assert push.tokens == chunked_R[push.replica].receive_RP[:, tables_R[0].num_homes + push.slot].sum() > 0


@given(planned_steps())
def test_without_a_plan_every_expert_is_computed_at_home(step):
    plan, demand = step
    for m, layer in np.ndindex(plan.replica_MLRB.shape[:2]):
        tokens_RE, map_E = demand.tokens_MLRE[m, layer].astype(np.int64), plan.physical_to_logical_map[layer]
        for rank in range(plan.num_ranks):
            tables = home_tables(tokens_RE, map_E.astype(np.int64), Place(rank, 5, m))
            assert (tables.pushes, tables.send_RP.shape[1]) == ((), tables.num_homes)
            assert tables.receive_RP.tolist() == tokens_RE[:, map_E.reshape(plan.num_ranks, -1)[rank]].tolist()


def experts_in_slots(plan, m, layer):
    """Expert in each local slot of each rank; -1: empty."""
    homes_RP = plan.physical_to_logical_map[layer].reshape(plan.num_ranks, -1)
    return np.concatenate([homes_RP, plan.replica_MLRB[m, layer]], axis=1)
