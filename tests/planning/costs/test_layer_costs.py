"""Closed forms of the arrays, and slow loops beside them."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.cluster import Link
from relibra.planning.costs import exchange
from relibra.planning.costs.compute import dense_seconds, expert_seconds, sample_attention_seconds
from relibra.planning.costs.copies import copy_costs, pushed_copies
from relibra.planning.costs.exchange import exchange_costs
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.planning.traffic.split import split_tokens
from tests.planning.costs.by_hand import EXPERT, cluster_for
from tests.planning.plans import planned_step, planned_steps


def test_dense_seconds_are_two_flops_per_weight_and_row():
    plan, demand = planned_step(np.random.default_rng(0), nodes=1, per_node=2)
    machine = cluster_for(plan)  # 180 flops per second
    assert dense_seconds(machine, np.array([0.0, 9.0]), 20, np.array([0.0, 180.0])).tolist() == [0.0, 3.0]
    assert not sample_attention_seconds(demand, machine, EXPERT).any()
    tokens_S = demand.counts_SLE[:, 0].sum(axis=1) // 2
    seconds_S = (2 * 4 * 2**2 * tokens_S + 4 * 2 * tokens_S * (tokens_S + 1) / 2) / 180
    np.testing.assert_allclose(sample_attention_seconds(replace(demand, top_k=2), machine, EXPERT), seconds_S)


@given(planned_steps(), st.booleans())
def test_each_expert_is_a_gemm_of_its_own_rows(step, with_table):
    plan, demand = step
    machine = cluster_for(plan, gemm_table=((2, 60.0), (8, 180.0)) if with_table else ())
    home_MLR, replica_MLR = expert_seconds(plan, demand, machine, EXPERT)
    for m, layer in np.ndindex(*home_MLR.shape[:2]):
        home_R, replica_R = np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
        left_E = demand.load_MLE[m, layer].tolist()
        for rank, slot in np.argwhere(plan.replica_MLRB[m, layer] >= 0):
            rows = int(plan.quota_MLRB[m, layer, rank, slot])
            left_E[plan.replica_MLRB[m, layer, rank, slot]] -= rows
            replica_R[rank] += machine.gemm_seconds(np.array([rows]), 60.0)[0]
        for e, rows in enumerate(left_E):
            home_R[plan.home_LE[layer, e]] += machine.gemm_seconds(np.array([rows]), 60.0)[0]
        np.testing.assert_allclose(home_MLR[m, layer], home_R)
        np.testing.assert_allclose(replica_MLR[m, layer], replica_R)


def test_a_gemm_table_makes_small_pieces_expensive():
    plan, demand = planned_step(np.random.default_rng(1), nodes=1, per_node=1, experts_per_rank=2, layers=1, slots=0)
    counts_SLE = np.zeros_like(demand.counts_SLE)
    counts_SLE[0, 0], counts_SLE[1, 0] = [8, 8], [16, 0]
    demand = plan.scheduled(replace(demand, counts_SLE=counts_SLE))
    cluster = cluster_for(plan, gemm_table=((8, 60.0), (16, 180.0)))
    assert layer_costs(plan, demand, cluster_for(plan), EXPERT).compute_ML[:, 0].tolist() == [16.0, 16.0, 0.0]
    assert layer_costs(plan, demand, cluster, EXPERT).compute_ML[:, 0].tolist() == [
        2 * 8 * 180 / 60,
        16 * 180 / 180,
        0.0,
    ]


@given(planned_steps())
@settings(deadline=None)
def test_exchanges_are_those_of_the_split(step):
    plan, demand = step
    inside, send, receive = (Link(latency_seconds=a, bytes_per_second=b) for a, b in ((1, 10), (3, 2), (5, 1)))
    machine, G = cluster_for(plan, intra=inside, inter_send=send, inter_receive=receive), plan.ranks_per_node
    costs = exchange_costs(plan, demand, machine, EXPERT)
    tokens_MLRE = demand.tokens_MLRE
    shape_MLR = tokens_MLRE.shape[:3]
    nothing = DistinctRows(
        ranks_MLRR=np.zeros((*shape_MLR, plan.num_ranks), int), nodes_MLRN=np.zeros((*shape_MLR, plan.num_nodes), int)
    )
    counted = exchange_costs(plan, demand, machine, EXPERT, nothing)
    assert not counted.out_MLR.any()
    assert not counted.dispatch_ML.any()
    np.testing.assert_array_equal(counted.gates_ML, costs.gates_ML)
    for at in np.ndindex(*tokens_MLRE.shape[:2]):
        arrays = (tokens_MLRE[at], plan.home_LE[at[1]], plan.replica_MLRB[at], plan.quota_MLRB[at])
        split, links, peers = split_tokens(*arrays, G), Counter(), defaultdict(set)
        for source, instance in np.argwhere(split.tokens_RI > 0):
            rank, rows = int(split.rank_I[instance]), int(split.tokens_RI[source, instance])
            if rank != source:
                kind = "intra" if rank // G == source // G else "inter"
                for way, at_rank, other in (("out", int(source), rank), ("in", rank, int(source))):
                    links[kind, way, at_rank] += rows
                    peers[kind, way, at_rank].add(other)
        for r in range(plan.num_ranks):
            for way, found_MLR, gates_MLR in (
                ("out", costs.out_MLR, costs.gates_out_MLR),
                ("in", costs.in_MLR, costs.gates_in_MLR),
            ):
                assert found_MLR[(*at, r)] == gates_MLR[(*at, r)] == links["intra", way, r] + links["inter", way, r]
        assert costs.cross_node_ML[at] == sum(n for port, n in links.items() if port[:2] == ("inter", "out"))
        for row_bytes, ways in (
            (4, ((costs.dispatch_ML, "out", "in"), (costs.combine_ML, "in", "out"))),
            (2, ((costs.gates_ML, "out", "in"), (costs.gates_back_ML, "in", "out"))),
        ):
            for found_ML, sent, received in ways:
                slowest = 0.0
                for (kind, way, rank), rows in links.items():
                    link = machine.intra if kind == "intra" else {sent: send, received: receive}[way]
                    seconds = link.latency_seconds * len(peers[kind, way, rank])
                    slowest = max(slowest, seconds + rows * row_bytes / link.bytes_per_second)
                assert found_ML[at] == pytest.approx(slowest)


@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
@pytest.mark.parametrize("counts_rows", [False, True])
def test_blocks_of_micro_batches_cost_what_they_cost_together(dispatch, counts_rows, monkeypatch):
    plan, demand = planned_step(np.random.default_rng(2), nodes=2, per_node=2, micro_batches=5)
    plan, machine, shape_MLR = replace(plan, dispatch=dispatch), cluster_for(plan), demand.tokens_MLRE.shape[:3]
    few_MLRR, few_MLRN = (np.arange(np.prod(shape_MLR) * n).reshape(*shape_MLR, n) % 3 for n in (4, 2))
    distinct = DistinctRows(ranks_MLRR=few_MLRR, nodes_MLRN=few_MLRN) if counts_rows else None
    found = []
    for at_once in (1, 10_000):
        monkeypatch.setattr(exchange, "_AT_ONCE", at_once)
        found.append(exchange_costs(plan, demand, machine, EXPERT, distinct))
    one, other = found
    assert len(one.gates_ML) == shape_MLR[0] > 2
    for name in ("dispatch_ML", "combine_ML", "gates_ML", "gates_back_ML", "cross_node_ML", "out_MLR", "in_MLR"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@given(planned_steps())
@settings(deadline=None)
def test_hierarchical_exchanges_have_two_stages(step):
    """Slow and obvious: every choice by itself, from its rank to the relay, then to the rank that computes."""
    plan, demand = replace(step[0], dispatch="hierarchical"), step[1]
    inside, send, receive = (Link(latency_seconds=a, bytes_per_second=b) for a, b in ((1, 10), (3, 2), (5, 1)))
    machine, G = cluster_for(plan, intra=inside, inter_send=send, inter_receive=receive), plan.ranks_per_node
    costs = exchange_costs(plan, demand, machine, EXPERT)
    flat = exchange_costs(replace(plan, dispatch="flat"), demand, machine, EXPERT)
    np.testing.assert_array_equal(costs.gates_ML, flat.gates_ML)
    np.testing.assert_array_equal(costs.cross_node_ML, flat.cross_node_ML)
    if plan.num_nodes == 1 or G == 1:
        np.testing.assert_array_equal(costs.dispatch_ML, flat.dispatch_ML)
        return
    for at in np.ndindex(*demand.tokens_MLRE.shape[:2]):
        arrays = (demand.tokens_MLRE[at], plan.home_LE[at[1]], plan.replica_MLRB[at], plan.quota_MLRB[at])
        split, links, peers = split_tokens(*arrays, G), (Counter(), Counter()), (defaultdict(set), defaultdict(set))

        def carry(stage, sender, receiver, rows, links=links, peers=peers):
            for way, rank, other in (("out", sender, receiver), ("in", receiver, sender)):
                links[stage][way, rank] += rows
                peers[stage][way, rank].add(other)

        for source, instance in np.argwhere(split.tokens_RI > 0).tolist():
            rank, rows = int(split.rank_I[instance]), int(split.tokens_RI[source, instance])
            relay = source if rank // G == source // G else rank // G * G + source % G
            if relay != source:
                carry(0, source, relay, rows)
            if rank != relay:
                carry(1, relay, rank, rows)
        for number, stage in enumerate(costs.stages):
            for found_ML, sent, received in ((stage.seconds_ML, "out", "in"), (stage.back_ML, "in", "out")):
                slowest = 0.0
                for (way, rank), rows in links[number].items():
                    link = machine.intra if number == 1 else {sent: send, received: receive}[way]
                    messages = len(peers[number][way, rank])
                    slowest = max(slowest, link.latency_seconds * messages + rows * 4 / link.bytes_per_second)
                assert found_ML[at] == pytest.approx(slowest)
            for way, found_MLR in (("out", stage.out_MLR), ("in", stage.in_MLR)):
                assert found_MLR[at].tolist() == [links[number][way, r] for r in range(plan.num_ranks)]


def test_a_home_sends_to_nodes_in_turn():
    plan, _ = planned_step(
        np.random.default_rng(0), nodes=4, per_node=1, experts_per_rank=1, micro_batches=1, layers=1, slots=1
    )
    replica_MLRB = np.full_like(plan.replica_MLRB, -1)
    for rank in set(range(4)) - {plan.home_LE[0, 0]}:
        replica_MLRB[0, 0, rank, 0] = 0
    plan, machine = replace(plan, replica_MLRB=replica_MLRB), cluster_for(plan)
    push, _, home = copy_costs(plan, machine, EXPERT)
    assert push.seconds_ML == push.network_ML == 3 * 60 / 2  # fan-out at 2 B/s; each replica takes 60 s
    assert home.seconds_ML == 3 * 60 / 1


@given(planned_steps())
def test_copies_take_as_long_as_the_busiest_port_of_any_rank(case):
    """Slow and obvious: one copy at a time, out of one rank and into another."""
    plan, _ = case
    machine = cluster_for(plan, intra=Link(latency_seconds=3, bytes_per_second=10))
    links = {"intra": (machine.intra,) * 2, "inter": (machine.inter_send, machine.inter_receive)}
    each = zip(copy_costs(plan, machine, EXPERT), pushed_copies(plan), (False, False, True), strict=True)
    for costs, copied_MLRB, to_home in each:
        for m, layer in np.ndindex(*plan.replica_MLRB.shape[:2]):
            copies, sent, received = Counter(), Counter(), Counter()
            for rank, slot in np.argwhere(copied_MLRB[m, layer]).tolist():
                home = int(plan.home_LE[layer, plan.replica_MLRB[m, layer, rank, slot]])
                kind = "intra" if home // plan.ranks_per_node == rank // plan.ranks_per_node else "inter"
                source, target = (rank, home) if to_home else (home, rank)
                sent[source] += 1
                received[target] += 1
                copies[kind, 0, source] += 1
                copies[kind, 1, target] += 1
            found = dict.fromkeys(links, 0.0)
            for (kind, way, _), number in copies.items():
                found[kind] = max(found[kind], links[kind][way].seconds(float(costs.bytes_each) * number, number))
            assert costs.seconds_ML[m, layer] == pytest.approx(max(found.values()))
            assert costs.network_ML[m, layer] == pytest.approx(found["inter"])
            for r in range(plan.num_ranks):
                assert (costs.sent_MLR[m, layer, r], costs.received_MLR[m, layer, r]) == (sent[r], received[r])
                assert costs.takes_part_MLR[m, layer, r] == bool(sent[r] or received[r])


def test_a_resident_replica_that_changes_its_slot_is_still_there():
    plan, _ = planned_step(np.random.default_rng(0), nodes=1, per_node=2, micro_batches=2, layers=1, slots=2)
    replica_MLRB = np.full_like(plan.replica_MLRB, -1)
    replica_MLRB[:, 0, 0] = [[2, 3], [1, 2]]
    plan = replace(plan, resident=True, replica_MLRB=replica_MLRB)
    forward, _, gradients = pushed_copies(plan)
    assert forward[:, 0, 0].tolist() == [[True, True], [True, False]]
    assert gradients[:, 0, 0].tolist() == [[False, True], [True, True]]
