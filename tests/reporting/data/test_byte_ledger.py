"""The byte ledger against a walk token by token, row by row, port by port."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.planner import plan_step
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.reporting.data.byte_ledger import byte_ledger, port_bytes_per_second
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace
from tests.planning.walks import ranks_of_tokens

ROW_BYTES = 10


def _step(seed, nodes, per_node, *, top_k=3, tokens=40, slots=1, cross=False, dispatch="flat"):
    experts = 2 * nodes * per_node
    shape = TraceShape(rows_per_sample=[25] * 6, num_layers=2, num_experts=max(4, experts), top_k=top_k)
    trace = domain_trace(shape, np.random.default_rng(seed), num_domains=2)
    cluster = replace(cluster_preset("h100x8", nodes * per_node, per_node), dispatch=dispatch)
    demand = cut_recorded(trace, tokens, cluster.num_ranks)
    balancer = "relibra_paper_anywhere" if cross else "relibra_paper_tokens"
    plan = plan_step(demand, cluster, Budget(slots=slots), balancer, never_worse=False)
    return trace, cluster, demand, plan


def _walk(trace, cluster, demand, plan, *, send_once):
    """Send each token's rows one by one and write down what every port sees: the slow and obvious ledger.

    With hierarchical dispatch a token crosses once to a node and is forwarded to its other ranks, stage after stage.
    """
    sample_T, scheduled = sample_of_rows(trace, demand), plan.scheduled(demand)
    G, (M, L) = cluster.ranks_per_node, scheduled.tokens_MLRE.shape[:2]
    in_stages = send_once and plan.dispatch == "hierarchical"
    useful, duplicate, forwarded, capacity = np.zeros((4, L))
    rates = {
        ("intra", "out"): cluster.intra,
        ("intra", "in"): cluster.intra,
        ("inter", "out"): cluster.inter_send,
        ("inter", "in"): cluster.inter_receive,
    }
    for m, layer in np.ndindex(M, L):
        ports = {}

        def carry(kind, sender, receiver, ports=ports):
            for key in ((kind, "out", sender), (kind, "in", receiver)):
                ports[key] = ports.get(key, 0) + ROW_BYTES

        for source, ranks in ranks_of_tokens(plan, scheduled, trace.experts_TLK, sample_T, m, layer):
            crossed = set()
            for number, to in enumerate(ranks):
                again, node = to in ranks[:number], to // G
                if to == source or (again and send_once):
                    continue
                (duplicate if again else useful)[layer] += ROW_BYTES
                door = source if node == source // G else node * G + source % G  # the rank of the same number there
                if door != source and node not in crossed:
                    carry("inter", source, door)
                    forwarded[layer] += ROW_BYTES * (door not in ranks if in_stages else door != to)
                    crossed |= {node} if in_stages else set()
                if door != to:
                    carry("intra", door, to)
        seconds = {"intra": 0.0, "inter": 0.0}
        for key, sent in ports.items():
            seconds[key[0]] = max(seconds[key[0]], sent / rates[key[:2]].bytes_per_second)
        busiest = sum(seconds.values()) if in_stages else max(seconds.values())
        capacity[layer] += busiest * port_bytes_per_second(cluster)
    return useful, duplicate, forwarded, capacity


@settings(max_examples=24, deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from([(1, 2), (2, 2), (3, 1), (2, 3)]),
    st.booleans(),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(["flat", "hierarchical"]),
)
def test_the_ledger_is_that_of_a_walk_over_tokens(seed, machine, send_once, slots, cross, dispatch):
    step = _step(seed, *machine, slots=slots, cross=cross, dispatch=dispatch)
    trace, cluster, demand, plan = step
    scheduled = plan.scheduled(demand)
    distinct = distinct_rows_of_step(plan, scheduled, trace.experts_TLK, sample_of_rows(trace, demand))
    ledger = byte_ledger(plan, scheduled, cluster, ROW_BYTES, distinct=distinct, send_once=send_once)
    found = ledger.useful_L, ledger.duplicate_L, ledger.forwarded_L, ledger.capacity_L
    for ours, theirs in zip(found, _walk(*step, send_once=send_once), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert ledger.exact
    product = ledger.data_factor_L * ledger.routing_factor_L * ledger.port_factor_L
    np.testing.assert_allclose(product, ledger.efficiency_L)
    factors = (ledger.data_factor_L, ledger.routing_factor_L, *([] if send_once else [ledger.port_factor_L]))
    for factor in factors:
        assert ((factor > 0) & (factor <= 1 + 1e-12)).all()


def test_pairs_bound_the_useful_bytes_from_below():
    trace, cluster, demand, plan = _step(3, 2, 2)
    scheduled = plan.scheduled(demand)
    distinct = distinct_rows_of_step(plan, scheduled, trace.experts_TLK, sample_of_rows(trace, demand))
    exact = byte_ledger(plan, scheduled, cluster, ROW_BYTES, distinct=distinct).total()
    bounded = byte_ledger(plan, scheduled, cluster, ROW_BYTES).total()
    assert not bounded.exact
    assert 0.5 * exact.useful_L[0] < bounded.useful_L[0] <= exact.useful_L[0] * 1.02  # homes' share, for replicas too
    assert bounded.capacity_L[0] == pytest.approx(exact.capacity_L[0])


@pytest.mark.parametrize(
    ("alpha", "each", "once"),
    [(0.0, (0.92, 0.74, 0.408), (1.0, 0.74, 0.440)), (1.0, (None, 0.20, 0.108), (1.0, 0.23, 0.138))],
)
def test_routes_on_rails_give_the_factors_of_the_toy(alpha, each, once):
    """32 ranks in four servers, 8 of 128 experts, 2,048 tokens: data and port factor, efficiency; routing 0.60.

    Capacity as in the toy: two ports of each rank, until the rank with most rows to send or to receive is done. That
    is a maximum of few draws: 20 others of even routes had port factors of 0.73 to 0.78.
    """
    rng, popularity_E = np.random.default_rng(1), np.arange(1, 129) ** -alpha
    keys_TE = np.log(rng.permutation(popularity_E)) + rng.gumbel(size=(2048, 128))
    routes = np.argsort(-keys_TE, axis=1)[:, None, :8].astype(np.uint8)
    trace = RoutingTrace.from_samples(np.split(routes, 32), num_experts=128)
    cluster = cluster_preset("h100x8", 32)
    demand = cut_recorded(trace, 2048, 32)
    static = plan_step(demand, cluster, Budget(slots=0), "static", expert=ExpertShape(hidden=8, width=8))
    distinct = distinct_rows_of_step(static, demand, trace.experts_TLK, sample_of_rows(trace, demand))
    own_ports = []
    for send_once, (data, port, efficiency) in ((False, each), (True, once)):
        total = byte_ledger(static, demand, cluster, ROW_BYTES, distinct=distinct, send_once=send_once).total()
        own_ports.append(total.port_factor_L[0])
        rows_RR = distinct.ranks_MLRR[0, 0] if send_once else demand.tokens_MLRE[0, 0].reshape(32, 32, 4).sum(axis=2)
        rows_RR = rows_RR * ~np.eye(32, dtype=bool)
        busiest = max(rows_RR.sum(axis=0).max(), rows_RR.sum(axis=1).max())
        sent = total.useful_L[0] / total.data_factor_L[0] / total.routing_factor_L[0]
        assert total.routing_factor_L[0] == pytest.approx(0.60, abs=0.02)
        assert data is None or total.data_factor_L[0] == pytest.approx(data, abs=0.005)
        assert sent / (64 * busiest * ROW_BYTES) == pytest.approx(port, abs=0.05)
        assert total.useful_L[0] / (64 * busiest * ROW_BYTES) == pytest.approx(efficiency, abs=0.03)
    assert alpha == 0 or own_ports[0] < own_ports[1], "hot experts cost ports, and less where a token goes once"


def test_rows_that_stay_on_their_rank_travel_nowhere():
    _, cluster, demand, plan = _step(0, 1, 1)
    ledger = byte_ledger(plan, plan.scheduled(demand), cluster, ROW_BYTES)
    assert not ledger.useful_L.any()
    assert not ledger.capacity_L.any()
    assert (ledger.efficiency_L == 1).all()


@pytest.mark.parametrize("seed", range(3))
def test_rows_sent_once_have_no_duplicates(seed):
    _, cluster, demand, plan = _step(seed, 2, 2)
    assert demand.pairs_LEE is not None
    row_bytes = 4096 + 2 * seed
    once = byte_ledger(plan, demand, cluster, row_bytes, send_once=True)
    assert once.duplicate_L.tolist() == once.total().duplicate_L.tolist() * 2 == [0.0, 0.0]
    assert once.data_factor_L.tolist() == [1.0, 1.0]
    each = byte_ledger(plan, demand, cluster, row_bytes)
    assert (each.duplicate_L > row_bytes).all(), "real ones stay"
