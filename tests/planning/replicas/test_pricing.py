"""Prices of several choices of replicas: the cheapest one everywhere, and a deadline looked at between them."""

import time
from dataclasses import replace

import numpy as np
import pytest
from relibra.planning.replicas import pricing
from relibra.planning.search.deadline import Deadline

from relibra.cluster import Link
from relibra.planning.balancer import PlacementRequest
from relibra.planning.budget import Budget
from relibra.planning.costs.compute import mean_attention_seconds
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.placement import static_homes
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from tests.planning.cases import cluster, make_demand

EXPERT = EXPERT_SHAPES["qwen3-30b-a3b"]
BUDGET = Budget(slots=2, move_homes=False, cross_node_copies=True, objective="seconds")


def asked(layers=3, *, machine=None):
    """Return a request with many tokens, its demand, and the homes of the static layout."""
    demand, machine = make_demand(64, layers, 32, 8, 16, 1), machine or cluster(2, 8)
    demand = replace(demand, counts_SLE=demand.counts_SLE * 700, tokens_MLRE=demand.tokens_MLRE * 700)
    request = PlacementRequest(
        demand=demand,
        cluster=machine,
        budget=BUDGET,
        expert=EXPERT,
        previous=static_homes(machine.topology, demand.layer_ids, 32),
        warm=False,
        total_LE=demand.load_MLE.sum(axis=0).astype(np.float64),
        history_MLE=None,
    )
    return request, demand, np.tile(np.repeat(np.arange(16), 2), (layers, 1))


def test_every_micro_batch_and_layer_takes_its_cheapest_choice():
    request, demand, home_LE = asked()
    made = [choose() for choose in pricing.replica_choices(request, demand, home_LE)]
    assert len(made) == 1 + 2 * 2 + 3
    prices = np.stack([pricing.seconds(request, demand, home_LE, *one) for one in made])
    replica, quota, best_ML = pricing.cheapest_replicas(request, demand, home_LE, Deadline(None), share=0.5)
    np.testing.assert_array_equal(best_ML, prices.min(axis=0))
    np.testing.assert_allclose(pricing.seconds(request, demand, home_LE, replica, quota), best_ML, rtol=1e-12)
    assert (np.argmin(prices, axis=0) > 4).any()  # copies against traffic among them


@pytest.mark.parametrize(("clock", "priced"), [(Deadline(1e-9), 2), (Deadline(1e9), 8), (Deadline(None), 8)])
def test_after_the_deadline_no_replicas_and_the_fewest_are_all_that_is_priced(monkeypatch, clock, priced):
    request, demand, home_LE = asked()
    request = replace(request, budget=replace(request.budget, threads=1))  # several would price in any order
    copies, price = [], pricing.seconds
    monkeypatch.setattr(pricing, "seconds", lambda *args: copies.append(int((args[3] >= 0).sum())) or price(*args))
    replica, _, _ = pricing.cheapest_replicas(request, demand, home_LE, clock, share=0.9)
    assert len(copies) == priced
    assert clock.missed == (priced == 2)
    assert copies[0] == 0 < copies[1] == min(copies[1:])
    assert replica.shape == (8, 3, 16, 2)


def test_no_further_choice_begins_that_would_end_too_late(monkeypatch):
    request, demand, home_LE = asked()
    request = replace(request, budget=replace(request.budget, threads=2))  # two choices at a time
    clock, found = Deadline(1000.0), []
    monkeypatch.setattr(Deadline, "elapsed", lambda _: 100.0 * len(found))  # each choice takes 100 s
    monkeypatch.setattr(pricing, "seconds", lambda *args, own=pricing.seconds: found.append(args[3]) or own(*args))
    pricing.cheapest_replicas(request, demand, home_LE, clock, share=0.55)
    assert len(found) == 4
    assert clock.missed


def test_copies_on_other_nodes_hide_in_both_directions():
    request, demand, _ = asked()
    attention = mean_attention_seconds(demand, request.cluster, EXPERT)
    out = EXPERT.weight_bytes / request.cluster.inter_send.bytes_per_second
    # Backward weights and gradients, twice the bytes, go under twice the attention: 3 / 2 as long per copy.
    assert pricing.copies_hidden(request, demand) == int(attention / (1.5 * out))
    slow = Link(latency_seconds=0, bytes_per_second=request.cluster.inter_send.bytes_per_second / 3)
    slow_out, _, _ = asked(machine=replace(request.cluster, inter_send=slow))
    assert pricing.copies_hidden(slow_out, demand) == int(attention / (3 * out))


def test_a_short_deadline_is_kept_over_many_layers():
    demand, machine = make_demand(64, 48, 64, 8, 16, 4), cluster(2, 8)
    demand = replace(demand, counts_SLE=demand.counts_SLE * 200, tokens_MLRE=demand.tokens_MLRE * 200)
    budget = replace(BUDGET, move_homes=True, deadline_seconds=0.02)
    first, _, _ = asked(2)
    plan_step(first.demand, machine, budget, expert=EXPERT)  # compiled now
    begun = time.monotonic()
    plan = plan_step(demand, machine, budget, expert=EXPERT)
    assert time.monotonic() - begun < 0.02 + 1.5  # what is done in any case, checks; other work may be running
    assert plan.cut_short
    validate_plan(plan, machine.topology, demand)
    assert plan.predicted["total"] <= plan_step(demand, machine, budget, "static", expert=EXPERT).predicted["total"]
