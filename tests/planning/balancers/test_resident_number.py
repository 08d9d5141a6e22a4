"""How many resident slots a plan takes where groups of micro-batches are short: memory is a limit, not an order."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.steps import domain_step
from relibra.cluster import cluster_preset
from relibra.planning.budget import RUN_DEFAULTS
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.planner import plan_step, settle_resident_slots

QWEN, MACHINE = EXPERT_SHAPES["qwen3-30b-a3b"], cluster_preset("h100x8", 16)
PLENTY = replace(RUN_DEFAULTS, memory_gib=40.0, threads=1)


def step_in_groups(seed, per_group, micro_batches=4):
    demand = domain_step(
        ranks=16, layers=1, experts=32, micro_batches=micro_batches, samples=16 * micro_batches, tokens=256, seed=seed
    )
    return replace(demand, group_M=(np.arange(micro_batches) // per_group).astype(np.int32))


def step_seconds(plan):
    """Seconds of a step with its share of the moves."""
    relocation = plan.predicted["relocation"]
    return plan.predicted["total"] - relocation + relocation / RUN_DEFAULTS.steps_served


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_group", [1, 2])
def test_more_memory_never_makes_a_step_of_short_groups_dearer(seed, per_group):
    demand = step_in_groups(seed, per_group)
    without, plenty = (
        plan_step(demand, MACHINE, replace(PLENTY, memory_gib=memory), expert=QWEN) for memory in (0.0, 40.0)
    )
    assert not without.resident
    assert step_seconds(plenty) <= 1.01 * step_seconds(without)


def test_long_groups_and_given_numbers_take_all_resident_slots():
    demand = step_in_groups(0, 2)
    limit = PLENTY.with_resident_slots(QWEN, 1)
    assert limit.resident_slots == 4
    for kept in (replace(demand, group_M=None), step_in_groups(0, 4), step_in_groups(0, 4, micro_batches=8)):
        assert settle_resident_slots(kept, MACHINE, limit, expert=QWEN).resident_slots == 4
    given = replace(PLENTY, resident_slots=4).with_resident_slots(QWEN, 1)
    assert settle_resident_slots(demand, MACHINE, given, expert=QWEN).resident_slots == 4


def test_a_settled_number_is_that_of_the_plan():
    demand = step_in_groups(0, 1)
    settled = settle_resident_slots(demand, MACHINE, PLENTY.with_resident_slots(QWEN, 1), expert=QWEN)
    assert settled.resident_slots < 4
    assert not settled.fewer_resident
    plan = plan_step(demand, MACHINE, PLENTY, expert=QWEN)
    assert (plan.resident, plan.slots) == (settled.resident_slots > 0, settled.resident_slots or 4)
