"""Rows of hierarchical dispatch against tokens that walk one by one, from rank to relay to rank."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra import RoutingTrace
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.planning.traffic.relays import rows_to_nodes, stage_rows
from relibra.planning.traffic.traffic import BETWEEN, IN, INSIDE, OUT, link_rows
from relibra.routing.demand import Demand
from tests.planning.plans import planned_step
from tests.planning.walks import ranks_of_tokens


def traced_step(seed, nodes, per_node, top_k):
    """Make a random plan of a step, and the tokens of its samples."""
    rng = np.random.default_rng(seed)
    plan, demand = planned_step(rng, nodes=nodes, per_node=per_node, experts_per_rank=2, slots=0, micro_batches=2)
    S, L, E = demand.counts_SLE.shape
    length_S = rng.integers(0, 12, S)
    experts_TLK = rng.random((int(length_S.sum()), L, E)).argsort(axis=-1)[..., : min(top_k, E)]
    trace = RoutingTrace.from_samples(np.split(experts_TLK, np.cumsum(length_S)[:-1]), num_experts=E)
    counted = replace(Demand.from_trace(trace), layer_ids=plan.layer_ids)
    scheduled = counted.with_schedule(plan.micro_batch_S, plan.rank_S, plan.num_ranks)
    replica_MLRB = np.full((*plan.replica_MLRB.shape[:3], 1), -1, np.int16)
    quota_MLRB = np.zeros(replica_MLRB.shape, np.int32)
    left_MLE = scheduled.load_MLE.copy()
    for m, layer, r in np.ndindex(replica_MLRB.shape[:3]):
        expert = rng.choice(np.flatnonzero(plan.home_LE[layer] != r)) if plan.num_ranks > 1 else -1
        if expert >= 0 and rng.random() < 0.7:
            quota = rng.integers(0, left_MLE[m, layer, expert] + 1)
            left_MLE[m, layer, expert] -= quota
            replica_MLRB[m, layer, r, 0], quota_MLRB[m, layer, r, 0] = expert, quota
    plan = replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB, dispatch="hierarchical")
    return plan, scheduled, trace.experts_TLK, np.repeat(np.arange(S), length_S)


STEPS = (st.integers(0, 2**32 - 1), st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)]), st.integers(1, 4))


@given(*STEPS)
@settings(deadline=None, max_examples=40)
def test_rows_of_both_dispatches_are_those_of_a_walk_over_tokens(seed, machine, top_k):
    plan, demand, experts_TLK, sample_T = traced_step(seed, *machine, top_k)
    G, M, L = plan.ranks_per_node, *plan.replica_MLRB.shape[:2]
    distinct = distinct_rows_of_step(plan, demand, experts_TLK, sample_T)
    for m, layer in np.ndindex(M, L):
        flat, stages, to_node, arrived, computed = Counter(), Counter(), Counter(), Counter(), Counter()
        for source, choices in ranks_of_tokens(plan, demand, experts_TLK, sample_T, m, layer):
            ranks = set(choices)
            for node in {rank // G for rank in ranks}:
                to_node[source, node] += 1
                relay = node * G + source % G if node != source // G else source
                arrived[relay, node] += relay in ranks  # computed where it came in: nothing is forwarded
                if relay != source:
                    stages[BETWEEN, source, relay] += 1
                for rank in ranks - {relay}:
                    if rank // G == node:
                        stages[INSIDE, relay, rank] += 1
            for rank in ranks:
                computed[rank // G] += 1
                if rank != source:
                    flat[int(rank // G != source // G), source, rank] += 1
        nodes_RN = distinct.nodes_MLRN[m, layer]
        assert {key: n for key, n in np.ndenumerate(nodes_RN) if n} == dict(to_node)
        here = (slice(m, m + 1), layer)
        found_rows, found_peers = stage_rows(distinct.ranks_MLRR[here], distinct.nodes_MLRN[here])
        ones_LR = np.ones((1, plan.num_ranks))
        flat_rows = link_rows(distinct.ranks_MLRR[here].astype(np.int64), ones_LR, G)[0]
        for walked, rows_2L2R, peers_2L2R in ((stages, found_rows, found_peers), (flat, flat_rows, None)):
            rows_22R = np.zeros((2, 2, plan.num_ranks))
            peers_22R = np.zeros((2, 2, plan.num_ranks), int)
            for (link, sender, receiver), rows in walked.items():
                for way, rank in ((OUT, sender), (IN, receiver)):
                    rows_22R[link, way, rank] += rows
                    peers_22R[link, way, rank] += 1
            np.testing.assert_array_equal(rows_2L2R[:, 0], rows_22R)
            if peers_2L2R is not None:
                np.testing.assert_array_equal(peers_2L2R[:, 0], peers_22R)
        for node in range(plan.num_nodes):  # what is sent inside: what did not come in where it is computed
            own = slice(node * G, (node + 1) * G)
            direct = sum(arrived[relay, node] for relay in range(own.start, own.stop))
            assert found_rows[INSIDE, 0, OUT, own].sum() == computed[node] - direct


@given(*STEPS)
@settings(deadline=None, max_examples=40)
def test_no_more_rows_cross_than_with_flat_dispatch(seed, machine, top_k):
    plan, demand, experts_TLK, sample_T = traced_step(seed, *machine, top_k)
    G, N, R = plan.ranks_per_node, plan.num_nodes, plan.num_ranks
    distinct = distinct_rows_of_step(plan, demand, experts_TLK, sample_T)
    ranks_LRR, nodes_LRN = distinct.ranks_MLRR[0], distinct.nodes_MLRN[0]
    rows_2L2R, peers_2L2R = stage_rows(ranks_LRR, nodes_LRN)
    assert peers_2L2R[BETWEEN].max(initial=0) <= N - 1
    assert peers_2L2R[INSIDE].max(initial=0) <= G - 1
    flat_2L2R, _, _ = link_rows(ranks_LRR.astype(np.int64), np.ones((len(ranks_LRR), R)), G)
    assert (rows_2L2R[BETWEEN, :, OUT] <= flat_2L2R[BETWEEN, :, OUT]).all()
    if G == 1:
        np.testing.assert_array_equal(rows_2L2R, flat_2L2R)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3))
def test_an_estimate_of_rows_to_nodes_is_what_ranks_can_send(seed, nodes, per_node):
    rng = np.random.default_rng(seed)
    R = nodes * per_node
    traffic_LRR = rng.integers(0, 9, (2, R, R))
    rows_LRR = traffic_LRR * rng.random((2, 1, R))
    nodes_LRN = rows_to_nodes(traffic_LRR, rows_LRR, rng.random((2, nodes)))
    for layer, source, node in np.ndindex(nodes_LRN.shape):
        to_ranks = rows_LRR[layer, source, node * per_node : (node + 1) * per_node]
        assert max(to_ranks) <= nodes_LRN[layer, source, node] <= sum(to_ranks) + 1e-12


def test_a_token_for_two_ranks_of_a_node_crosses_once():
    rows_LRR, nodes_LRN = np.zeros((1, 4, 4), int), np.zeros((1, 4, 2), int)
    rows_LRR[0, 0, 2], rows_LRR[0, 0, 3], nodes_LRN[0, 0, 1] = 5, 5, 5  # 5 tokens of rank 0 for ranks 2 and 3
    rows_2L2R, _ = stage_rows(rows_LRR, nodes_LRN)
    assert rows_2L2R[BETWEEN, 0].tolist() == [[5, 0, 0, 0], [0, 0, 5, 0]]
    assert rows_2L2R[INSIDE, 0].tolist() == [[0, 0, 5, 0], [0, 0, 0, 5]]


def test_pairs_give_rows_per_node_that_count_shared_choices_once():
    from relibra.planning.costs.exchange import exchange_costs
    from tests.planning.costs.by_hand import EXPERT, cluster_for

    plan, demand, experts_TLK, sample_T = traced_step(3, 2, 2, 1)
    distinct = distinct_rows_of_step(plan, demand, experts_TLK, sample_T)
    pairs_LEE = np.zeros((len(plan.layer_ids), plan.num_experts, plan.num_experts), np.int64)
    for layer in range(len(pairs_LEE)):
        np.fill_diagonal(pairs_LEE[layer], demand.counts_SLE.sum(axis=0)[layer])
    bounded = exchange_costs(plan, replace(demand, pairs_LEE=pairs_LEE), cluster_for(plan), EXPERT)
    counted = exchange_costs(plan, demand, cluster_for(plan), EXPERT, distinct)
    for a, b in zip(bounded.stages, counted.stages, strict=True):  # one choice per token: the bound is exact
        np.testing.assert_allclose(a.seconds_ML, b.seconds_ML)
        np.testing.assert_allclose(a.out_MLR, b.out_MLR)
    assert counted.stages[0].links == "between nodes"
    assert counted.stages[0].seconds_ML.sum() == pytest.approx(
        counted.dispatch_ML.sum() - counted.stages[1].seconds_ML.sum()
    )
