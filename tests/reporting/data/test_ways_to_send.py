"""Ways to send rows: against the simulated step, against each other, and against counts by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra.cluster import Link, Transport, cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.layer_costs import counts_seconds
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.reporting.data.ways_to_send import ways_to_send
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.simulation import cut_model, model_shape, simulate_step

ROW_BYTES = 2 * 2048
"""Of a hidden state of qwen3-30b-a3b."""


def counted_step(seed, nodes, per_node, *, top_k=3, dispatch="flat", slots=1):
    """Return a plan, its demand, machine, model and counted rows, on synthetic routes of two layers."""
    experts = max(4, 2 * nodes * per_node)
    shape = TraceShape(rows_per_sample=[25] * 6, num_layers=2, num_experts=experts, top_k=top_k)
    trace = domain_trace(shape, np.random.default_rng(seed), num_domains=2)
    cluster = replace(cluster_preset("h100x8", nodes * per_node, per_node), dispatch=dispatch)
    demand = cut_recorded(trace, 40, cluster.num_ranks)
    plan = plan_step(demand, cluster, Budget(slots=slots), "relibra_paper_anywhere", never_worse=False)
    scheduled = plan.scheduled(demand)
    rows = distinct_rows_of_step(plan, scheduled, trace.experts_TLK, sample_of_rows(trace, demand))
    return plan, scheduled, cluster, cut_model(model_shape("qwen3-30b-a3b"), demand), rows


def ways_of(plan, demand, cluster, model, rows):
    """Return the ways by name."""
    return {way.way: way for way in ways_to_send(plan, demand, cluster, model.expert, model.top_k, rows)}


@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
@pytest.mark.parametrize("fences", [0.0, 2e-5])
def test_the_way_of_the_plan_takes_the_simulated_seconds(dispatch, fences):
    plan, demand, cluster, model, rows = counted_step(1, 2, 2, dispatch=dispatch)
    cluster = replace(cluster, transport=Transport(puts="expert", fence_seconds=fences))
    [used] = [way for way in ways_of(plan, demand, cluster, model, rows).values() if way.used]
    assert used.way == {"flat": "once per rank", "hierarchical": "once per node"}[dispatch]
    step = simulate_step(plan, demand, cluster, model, distinct=rows)
    assert used.seconds == pytest.approx(step.terms["exchange"], rel=1e-12)
    assert (used.fences > 0) == (fences > 0)


@settings(max_examples=20)
@given(
    st.integers(0, 999),
    st.sampled_from([(1, 2), (2, 2), (3, 1), (2, 3)]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2),
)
def test_once_per_rank_never_exceeds_a_gather(seed, machine, top_k, slots):
    step = counted_step(seed, *machine, top_k=top_k, slots=slots)
    ways = ways_of(*step)
    once, every, gathered = (ways[name] for name in ("once per rank", "per choice", "gather all"))
    assert once.duplicate_bytes == 0
    assert once.useful_bytes == every.useful_bytes == gathered.useful_bytes
    received = [way.useful_bytes + way.duplicate_bytes for way in (once, every, gathered)]
    assert received[0] <= min(received[1:])
    assert once.seconds <= min(every.seconds, gathered.seconds)
    assert once.messages == every.messages <= gathered.messages
    demand, ranks = step[1], machine[0] * machine[1]
    assert received[1] <= demand.tokens_MLRE.sum() * ROW_BYTES
    assert received[2] == demand.tokens_MLRE.sum() // top_k * (ranks - 1) * ROW_BYTES
    assert ("once per node" in ways) == (machine[0] > 1)
    if machine[0] > 1:
        assert ways["once per node"].forwarded_bytes <= every.forwarded_bytes + every.duplicate_bytes
    for way in ways.values():
        sent = way.useful_bytes + way.duplicate_bytes + way.forwarded_bytes
        assert way.data_factor * way.routing_factor * sent == pytest.approx(way.useful_bytes)


def test_gathering_pays_where_choices_outnumber_ranks():
    """Each choice by itself sends K (R - 1) / R rows per token, a gather R - 1: equal at K = R choices."""
    rng = np.random.default_rng(0)
    for top_k, cheaper in ((2, "per choice"), (4, "per choice"), (12, "gather all")):
        shape = TraceShape(rows_per_sample=[64] * 8, num_layers=1, num_experts=64, top_k=top_k)
        demand = cut_recorded(domain_trace(shape, rng, sigma=0.0), 512, 8)
        cluster, model = cluster_preset("h100x8"), cut_model(model_shape("qwen3-30b-a3b"), demand)
        ways = ways_of(StepPlan.static(demand, cluster.topology), demand, cluster, model, None)
        received = {name: ways[name].useful_bytes + ways[name].duplicate_bytes for name in ("per choice", "gather all")}
        assert min(received, key=received.get) == cheaper
        assert received["per choice"] == pytest.approx(512 * top_k * 7 / 8 * ROW_BYTES, rel=0.03)


def test_counting_costs_an_all_gather_per_layer():
    plan, demand, cluster, model, rows = counted_step(2, 2, 2)
    cells = demand.tokens_MLRE[..., 0, 0].size
    free, dear = (Link(latency_seconds=latency, bytes_per_second=rate) for latency, rate in ((0, 1e24), (1e6, 1e24)))
    for link in (cluster.inter_send, dear):
        machine = replace(cluster, inter_send=link, inter_receive=link)
        for name, way in ways_of(plan, demand, machine, model, rows).items():
            more = 0.0 if name == "gather all" else cells * counts_seconds(machine, plan.num_experts)
            assert way.seconds_counting == pytest.approx(way.seconds + more, rel=1e-12)
    nothing = replace(cluster, intra=free, inter_send=free, inter_receive=free)
    for way in ways_of(plan, demand, nothing, model, rows).values():
        assert way.seconds_counting - way.seconds < 1e-15


def test_shared_choices_that_nobody_counted_are_left_out():
    plan, demand, cluster, model, _ = counted_step(3, 2, 2)
    bounded = ways_of(plan, demand, cluster, model, None)
    assert list(bounded) == ["per choice", "once per rank", "once per node", "gather all"]
    unknown = ways_of(plan, replace(demand, pairs_LEE=None), cluster, model, None)
    assert list(unknown) == ["per choice", "gather all"]
    assert unknown["per choice"].used
    assert unknown["per choice"].seconds == bounded["per choice"].seconds > bounded["once per rank"].seconds


def test_a_single_rank_sends_nothing():
    plan, demand, cluster, model, rows = counted_step(0, 1, 1)
    assert ways_to_send(plan, demand, cluster, model.expert, model.top_k, rows) == []
