"""Residents that last: chosen from one step, they serve the next; read back from a checkpoint, the plan is the same."""

from dataclasses import replace

import numpy as np
import pytest

from relibra.cluster import cluster_preset
from relibra.errors import PlanError
from relibra.planning.balancers.lasting import Residents, with_residents
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.placement import Homes
from relibra.planning.planner import choose_residents, plan_step
from relibra.planning.validation import validate_plan
from tests.planning.balancers.test_relibra import small_step

EXPERT = EXPERT_SHAPES["qwen3-30b-a3b"]
CLUSTER = replace(cluster_preset("h100x8", 16), dispatch="hierarchical")
BUDGET = Budget(memory_gib=4.0, pack_samples=False)


@pytest.fixture(scope="module")
def first():
    demand = small_step(groups=2)
    return demand, plan_step(demand, CLUSTER, BUDGET, expert=EXPERT)


def test_replicas_of_one_step_serve_the_next(first):
    demand, plan = first
    assert plan.resident
    residents = choose_residents(plan, demand, CLUSTER, BUDGET, expert=EXPERT)
    assert np.array_equal(residents.home_LE, plan.home_LE)
    assert (residents.replica_LRB >= 0).any()
    coming = small_step(groups=2, step=1)
    lasting = plan_step(coming, CLUSTER, BUDGET, expert=EXPERT, residents=residents)
    validate_plan(lasting, CLUSTER.topology, coming)
    assert lasting.num_moved == 0
    held = lasting.replica_MLRB
    assert np.isin(held, [-1, *range(32)]).all()
    assert ((held == residents.replica_LRB) | (held == -1)).all(), "a slot holds its resident or nothing"
    bare = plan_step(coming, CLUSTER, replace(BUDGET, slots=0, move_homes=False), expert=EXPERT, previous=residents)
    assert lasting.predicted["total"] < bare.predicted["total"]


def test_a_resumed_run_plans_the_same(first):
    demand, plan = first
    residents = choose_residents(plan, demand, CLUSTER, BUDGET, expert=EXPERT)
    homes = Homes(**{name: getattr(plan, name) for name in Homes.__dataclass_fields__})
    read = with_residents(homes, residents.replica_LRB.tolist())
    assert isinstance(read, Residents)
    coming = small_step(groups=2, step=1)
    plans = [
        plan_step(coming, CLUSTER, BUDGET, expert=EXPERT, previous=one, residents=one) for one in (residents, read)
    ]
    assert plans[0].digest() == plans[1].digest()


def test_plans_without_slots_of_layers_have_no_residents(first):
    demand, _ = first
    for budget in (replace(BUDGET, memory_gib=0.0), replace(BUDGET, slots=0)):
        plan = plan_step(demand, CLUSTER, budget, expert=EXPERT)
        assert choose_residents(plan, demand, CLUSTER, budget, expert=EXPERT) is None


def test_residents_of_another_model_are_refused(first):
    demand, plan = first
    residents = choose_residents(plan, demand, CLUSTER, BUDGET, expert=EXPERT)
    other = small_step(layers=3, groups=2)
    with pytest.raises(PlanError, match="previous plan has layers"):
        plan_step(other, CLUSTER, BUDGET, expert=EXPERT, residents=residents)
