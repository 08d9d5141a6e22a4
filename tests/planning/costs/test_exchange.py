"""A transport: puts and fences of rows between nodes, from one peer to the shares of a proxy queue."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.cluster import Link, Topology, Transport
from relibra.planning.costs.exchange import exchange_costs
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand
from tests.planning.costs.by_hand import EXPERT, cluster_for
from tests.planning.plans import planned_steps


def one_source(peers, experts_per_peer, tokens, link):
    """Return a plan, its demand and its machine: rank 0 sends tokens to each expert of its peers, on other nodes."""
    R, E = peers + 1, (peers + 1) * experts_per_peer
    counts_SLE = np.full((1, 1, E), tokens, np.int32)
    counts_SLE[..., :experts_per_peer] = 0
    demand = Demand(counts_SLE=counts_SLE, layer_ids=np.array([0]), sample_ids=np.array([0]))
    scheduled = demand.with_schedule(np.zeros(1, np.int32), np.zeros(1, np.int32), R)
    fast = Link(latency_seconds=0, bytes_per_second=1e20)
    static = StepPlan.static(scheduled, Topology(num_nodes=R, ranks_per_node=1))
    return cluster_for(static, intra=fast, inter_send=link, inter_receive=fast), scheduled


def dispatch(machine, demand):
    """Return the dispatch of the static layout."""
    return exchange_costs(StepPlan.static(demand, machine.topology), demand, machine, EXPERT)


@given(planned_steps(), st.sampled_from(["flat", "hierarchical"]), st.sampled_from(["peer", "put"]))
def test_a_transport_of_cost_0_changes_no_bit(step, way, scope):
    plan, demand = replace(step[0], dispatch=way), step[1]
    link = Link(latency_seconds=0, bytes_per_second=3)
    for puts, machine in (
        ("peer", cluster_for(plan)),
        ("expert", cluster_for(plan, inter_send=link, inter_receive=link)),
    ):
        free = replace(machine, transport=Transport(puts=puts, fence_seconds=0.0, fence_scope=scope))
        known, found = (exchange_costs(plan, demand, one, EXPERT) for one in (machine, free))
        for name in ("dispatch_ML", "combine_ML", "gates_ML", "gates_back_ML", "out_MLR", "in_MLR"):
            assert np.array_equal(getattr(known, name), getattr(found, name)), name
        assert not any(stage.fences_ML.any() for stage in found.stages)


@given(planned_steps(), st.floats(0, 1), st.floats(0, 1))
def test_seconds_rise_with_each_constant_of_a_transport(step, latency, fence):
    plan, demand = step

    def seconds(transport, latency=latency):
        link = Link(latency_seconds=latency, bytes_per_second=3)
        machine = cluster_for(plan, inter_send=link, inter_receive=link, transport=transport)
        return exchange_costs(plan, demand, machine, EXPERT).dispatch_ML

    per_peer, per_put = (Transport(puts="expert", fence_seconds=fence, fence_scope=scope) for scope in ("peer", "put"))
    put_only = Transport(puts="expert")
    rising = [Transport(), put_only, per_peer, per_put, replace(per_put, fence_seconds=fence + 0.5)]
    found = [seconds(transport) for transport in rising]
    for below_ML, above_ML in pairwise(found):
        assert (below_ML <= above_ML).all()
    assert (seconds(per_put, latency + 0.5) >= seconds(per_put)).all()


def test_one_peer_has_a_closed_form():
    machine, demand = one_source(1, 4, 10, Link(latency_seconds=3, bytes_per_second=2))
    sent = 4 * 10 * EXPERT.row_bytes / 2
    for puts, scope, messages, fences in (("peer", "put", 1, 1), ("expert", "peer", 4, 1), ("expert", "put", 4, 4)):
        transport = Transport(puts=puts, fence_seconds=7, fence_scope=scope)
        costs = dispatch(replace(machine, transport=transport), demand)
        assert costs.dispatch_ML.tolist() == [[sent + 3 * messages + 7 * fences]]
        assert [stage.messages_ML.tolist() for stage in costs.stages] == [[[messages]]]
        assert [stage.fences_ML.tolist() for stage in costs.stages] == [[[fences]]]


@pytest.mark.parametrize(
    ("kib", "shares"), [(4, (5, 42, 52, 56)), (256, (46, 93, 99, 99)), (4096, (93, 100, 100, 100))]
)
def test_shares_of_a_proxy_queue_have_the_shape_of_the_toy(kib, shares):
    """12 peers x 8 puts, 0.5 us per post, 8 us of flight and a drain of 2 us on average 1 us late, 25 GB/s.

    A fence of the proxy waits for flight, drain and its signal's post behind each put; behind the last put of a peer
    for drain and eight signals. The network card's own fence costs the posts of signals. Shares in %, five points apart
    at most: posts and wire overlap in the toy's queue, and add up here.
    """
    tokens = kib * 1024 // EXPERT.row_bytes
    machine, demand = one_source(12, 8, tokens, Link(latency_seconds=0.5e-6, bytes_per_second=25e9))
    ways = [("put", 11.5), ("peer", 2 + 8 * 0.5), ("put", 0.5), ("peer", 8 * 0.5)]
    transports = [Transport(puts="expert", fence_seconds=us * 1e-6, fence_scope=scope) for scope, us in ways]
    only, *found = (
        float(dispatch(replace(machine, transport=transport), demand).dispatch_ML[0, 0])
        for transport in (Transport(puts="expert"), *transports)
    )
    reached = [100 * only / seconds for seconds in found]
    assert reached == pytest.approx(shares, abs=5.5)
    assert reached[0] < reached[1] <= reached[2] + 5
