"""Copies against traffic: legal, for a node's own hottest experts, and worth it where links between nodes are slow."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from relibra.planning.levers.traffic_copies import replicate_for_traffic

from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.costs.prediction import predict
from relibra.planning.planner import plan_step
from relibra.planning.traffic.split import split_tokens
from relibra.planning.validation import validate_plan
from tests.planning.cases import cluster, make_demand


@st.composite
def layers(draw):
    """Return (tokens_MRE, home_E, ranks per node, slots, traffic slots, most per home)."""
    nodes, per_node, per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    R = nodes * per_node
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    tokens_MRE = rng.integers(0, draw(st.sampled_from([2, 50])), size=(2, R, R * per_rank))
    home_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    slots = draw(st.integers(1, 3))
    return tokens_MRE, home_E, per_node, slots, draw(st.integers(0, slots)), draw(st.integers(0, 4))


@settings(max_examples=60)
@given(layers())
def test_quotas_are_tokens_there_are_and_no_rank_holds_an_expert_twice(case):
    tokens_MRE, home_E, per_node, slots, traffic_slots, most = case
    replica_MRB, quota_MRB = replicate_for_traffic(
        tokens_MRE, home_E, per_node, slots=slots, traffic_slots=traffic_slots, most_per_home=most
    )
    assert replica_MRB.shape == quota_MRB.shape == (*tokens_MRE.shape[:2], slots)
    for m, tokens_RE in enumerate(tokens_MRE):
        held_RB, quota_RB = replica_MRB[m], quota_MRB[m]
        assert ((quota_RB > 0) == (held_RB >= 0)).all()
        taken_E = np.bincount(held_RB[held_RB >= 0], quota_RB[held_RB >= 0], minlength=len(home_E))
        assert (taken_E <= tokens_RE.sum(axis=0)).all()
        for rank, held_B in enumerate(held_RB):
            held = held_B[held_B >= 0].tolist()
            assert len(held) == len(set(held))
            assert all(home_E[expert] != rank for expert in held)
        split = split_tokens(tokens_RE, home_E, held_RB, quota_RB, per_node)
        assert (split.tokens_RI.sum() == tokens_RE.sum()).all()


@settings(max_examples=60)
@given(layers())
def test_without_slots_for_evenness_each_node_holds_its_own_hottest_experts(case):
    tokens_MRE, home_E, per_node, slots, _, most = case
    replica_MRB, quota_MRB = replicate_for_traffic(
        tokens_MRE, home_E, per_node, slots=slots, traffic_slots=slots, most_per_home=most
    )
    for m, tokens_RE in enumerate(tokens_MRE):
        assert {
            (rank // per_node, expert): quota
            for rank, (held_B, quota_B) in enumerate(zip(replica_MRB[m], quota_MRB[m], strict=True))
            for expert, quota in zip(held_B.tolist(), quota_B.tolist(), strict=True)
            if expert >= 0
        } == held_by_nodes(tokens_RE, home_E, per_node, slots, most)


def held_by_nodes(tokens_RE, home_E, per_node, slots, most):
    """Slow and obvious: walk over (node, expert) by falling tokens while there is room."""
    R, E = tokens_RE.shape
    source_NE = tokens_RE.reshape(R // per_node, per_node, E).sum(axis=1)
    room_N, copies_R, held = [per_node * slots] * len(source_NE), [0] * R, {}
    pairs = [(-int(source_NE[node, e]), node, e) for node in range(len(source_NE)) for e in range(E)]
    for minus, node, e in sorted(pairs):
        home = home_E[e]
        if minus and home // per_node != node and room_N[node] and copies_R[home] < most:
            held[node, e] = -minus
            room_N[node] -= 1
            copies_R[home] += 1
    return held


def test_between_slow_links_a_plan_for_seconds_copies_experts_to_the_tokens():
    demand, expert = make_demand(64, 4, 32, 8, 16, 1), EXPERT_SHAPES["qwen3-30b-a3b"]
    demand = replace(demand, counts_SLE=demand.counts_SLE * 200, tokens_MLRE=demand.tokens_MLRE * 200, top_k=4)
    machine = cluster(2, 8)
    budget = Budget(slots=2, move_homes=False, place_samples=False, objective="seconds")
    inside = plan_step(demand, machine, budget, expert=expert)
    across = plan_step(demand, machine, replace(budget, cross_node_copies=True), expert=expert)
    validate_plan(across, machine.topology, demand)
    assert across.predicted["exchange"] < 0.95 * inside.predicted["exchange"]
    assert across.predicted["total"] < inside.predicted["total"]
    rows = [predict(plan, demand, machine, expert).cross_node_token_slots for plan in (across, inside)]
    assert rows[0] < rows[1]
