"""Plans of some layers, joined: the same decisions, the same checks, whoever made which part."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relibra.planning.layer_shards import demand_of_layers, join_layers, layers_of_rank

from relibra.errors import PlanError
from relibra.planning.budget import Budget
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from tests.planning.cases import cluster, demands, make_demand
from tests.planning.plans import planned_step, planned_steps


def plan_of_layers(plan, layers):
    """Return what a plan decides about some layers; its predicted seconds, which are of all layers, are left out."""
    return replace(
        plan,
        layer_ids=plan.layer_ids[layers],
        physical_to_logical_map=plan.physical_to_logical_map[layers],
        previous_map=plan.previous_map[layers],
        replica_MLRB=plan.replica_MLRB[:, layers],
        quota_MLRB=plan.quota_MLRB[:, layers],
        bound_ML=plan.bound_ML[:, layers],
        predicted={},
        demand_digest="",
    )


@given(st.integers(0, 30), st.integers(1, 9))
def test_every_layer_is_planned_by_one_rank_and_ranks_share_evenly(layers, ranks):
    parts = [layers_of_rank(layers, rank, ranks) for rank in range(ranks)]
    assert np.concatenate(parts).tolist() == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def parts_of(plan, demand, num_parts):
    shards = [layers_of_rank(len(plan.layer_ids), part, num_parts) for part in range(num_parts)]
    shards = [shard for shard in shards if len(shard)]
    return [plan_of_layers(plan, shard) for shard in shards], [demand_of_layers(demand, shard) for shard in shards]


@settings(max_examples=30)
@given(planned_steps(), st.integers(1, 4))
def test_a_plan_cut_by_layers_and_joined_decides_the_same(case, num_parts):
    plan, demand = replace(case[0], bound_ML=np.zeros_like(case[0].bound_ML)), case[1]
    machine = cluster(plan.num_nodes, plan.ranks_per_node)
    parts, demands_of_parts = parts_of(plan, demand, num_parts)
    for part, own in zip(parts, demands_of_parts, strict=True):
        validate_plan(part, machine.topology, own)
    joined = join_layers(parts, demand)
    validate_plan(joined, machine.topology, demand)
    assert joined.digest() == plan.digest()
    assert joined.bound_ML.tolist() == plan.bound_ML.tolist()
    assert joined.rank_load(demand).tolist() == plan.rank_load(demand).tolist()
    assert joined.skew(demand) == plan.skew(demand)


@settings(max_examples=8)
@given(demands(), st.integers(0, 2), st.booleans(), st.integers(2, 3))
def test_layers_planned_apart_are_valid_together_and_never_worse_than_static(case, slots, move, num_parts):
    demand, machine = case
    budget = Budget(slots=slots, objective="tokens", move_homes=move, place_samples=False, threads=1)
    shards = [layers_of_rank(len(demand.layer_ids), part, num_parts) for part in range(num_parts)]
    parts = [plan_step(demand_of_layers(demand, shard), machine, budget) for shard in shards if len(shard)]
    joined = join_layers(parts, demand)
    validate_plan(joined, machine.topology, demand)
    static = plan_step(demand, machine, budget, "static")
    assert joined.skew(demand) <= static.skew(demand) + 1e-12
    assert joined.bound(demand) <= joined.skew(demand) + 1e-12


def test_the_search_for_homes_is_as_good_by_parts():
    """It draws its steps by the layer's place among those it is asked for, so decisions may differ, at equal cost."""
    demand, machine = make_demand(24, 5, 16, 4, 4, seed=3), cluster(1, 4)
    budget = Budget(slots=1, objective="tokens", place_samples=False, threads=1)
    whole = plan_step(demand, machine, budget)
    joined = join_layers(
        [plan_step(demand_of_layers(demand, layers_of_rank(5, r, 4)), machine, budget) for r in range(4)], demand
    )
    assert joined.skew(demand) == pytest.approx(whole.skew(demand), rel=0.01)


@pytest.mark.parametrize("balancer", ["static", "eplb", "lplb"])
def test_layers_planned_apart_get_the_plan_of_all_layers(balancer):
    demand, machine = make_demand(24, 5, 16, 4, 4, seed=3), cluster(1, 4)
    budget = Budget(slots=1, objective="tokens", place_samples=False, threads=1)
    whole = plan_step(demand, machine, budget, balancer)
    parts = [plan_step(demand_of_layers(demand, layers_of_rank(5, r, 4)), machine, budget, balancer) for r in range(4)]
    joined = join_layers(parts, demand)
    assert joined.digest() == whole.digest()
    again = plan_step(demand, machine, budget, balancer, previous=whole)
    parts = [
        plan_step(demand_of_layers(demand, shard), machine, budget, balancer, previous=plan_of_layers(joined, shard))
        for shard in (layers_of_rank(5, r, 4) for r in range(4))
    ]
    assert join_layers(parts, demand).digest() == again.digest()


def test_a_joined_plan_knows_its_demand():
    plan, demand = planned_step(np.random.default_rng(0), layers=3)
    parts, _ = parts_of(plan, demand, 2)
    joined = join_layers(parts, demand)
    assert joined.demand_digest == demand.digest()
    other = replace(demand, counts_SLE=demand.counts_SLE + 1).with_schedule(
        plan.micro_batch_S, plan.rank_S, plan.num_ranks
    )
    with pytest.raises(PlanError, match="made for another demand"):
        joined.scheduled(other)


def test_a_part_that_breaks_a_rule_is_found_in_the_whole():
    plan, demand = planned_step(np.random.default_rng(1), layers=3)
    parts, _ = parts_of(plan, demand, 3)
    homes = parts[1].physical_to_logical_map.copy()
    homes[0, 0] = homes[0, 1]
    broken = join_layers([parts[0], replace(parts[1], physical_to_logical_map=homes), parts[2]], demand)
    with pytest.raises(PlanError, match="layer 3"):
        validate_plan(broken, cluster(plan.num_nodes, plan.ranks_per_node).topology, demand)


def test_parts_made_side_by_side_take_as_long_as_the_slowest():
    plan, demand = planned_step(np.random.default_rng(2), layers=2)
    parts, _ = parts_of(plan, demand, 2)
    joined = join_layers(
        [replace(parts[0], plan_seconds=0.5), replace(parts[1], balancer="other", cut_short=True)], demand
    )
    assert joined.plan_seconds == 0.5
    assert joined.balancer == "made up + other"
    assert joined.cut_short
    assert joined.predicted == {}


def test_parts_under_different_schedules_are_not_joined():
    plan, demand = planned_step(np.random.default_rng(3), layers=2)
    parts, _ = parts_of(plan, demand, 2)
    moved = replace(parts[1], rank_S=(parts[1].rank_S + 1) % plan.num_ranks)
    with pytest.raises(AssertionError, match="parts share a schedule"):
        join_layers([parts[0], moved], demand)


@pytest.mark.parametrize("balancer", ["moonep", "auto"])
def test_parts_with_different_slots_join(balancer):
    """MoonEP has a slot for every home, the layout kept instead of its plan those of the budget; auto takes any."""
    demand, machine = make_demand(24, 2, 16, 4, 4, seed=3), cluster(1, 4)
    budget = Budget(slots=2, resident_slots=0, objective="tokens", place_samples=False, threads=1)
    shards = [demand_of_layers(demand, layers_of_rank(2, part, 2)) for part in range(2)]
    uneven = plan_step(shards[0], machine, budget, balancer)
    even = plan_step(shards[1], machine, budget, "static")
    residents = plan_step(shards[1], machine, replace(budget, resident_slots=2), "relibra")
    for other in (even, residents):
        joined = join_layers([uneven, other], demand)
        validate_plan(joined, machine.topology, demand)
        filled = [part for part in (uneven, other) if part.num_copies]
        assert joined.slots == max(part.slots for part in filled)
        assert joined.resident == all(part.resident for part in filled)
        assert joined.num_copies == uneven.num_copies + other.num_copies > 0
