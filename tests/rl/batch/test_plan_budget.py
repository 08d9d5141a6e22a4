"""What the settings of a run let a plan use."""

from dataclasses import replace

import pytest

from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import expert_shape
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.config.settings import PlanSettings
from relibra.simulation import model_shape


@pytest.mark.parametrize(
    ("model", "resident"),
    [("qwen3-30b-a3b", 4), ("deepseek-v2-lite", 4), ("gpt-oss-20b", 2), ("qwen3-235b-a22b", 0)],
)
def test_slots_stay_with_their_layer_within_a_tenth_of_the_memory(model, resident):
    machine, expert, layers = cluster_preset("h100x8", 16), expert_shape(model), model_shape(model).moe_layers
    budget = plan_budget(PlanSettings(), machine).with_resident_slots(expert, layers)
    assert (budget.slots, budget.resident_slots) == (4, resident)
    one = expert.weight_bytes + expert.gradient_bytes
    in_memory = (resident * layers + budget.slots - resident) * one
    assert in_memory <= 0.1 * machine.memory_bytes
    if resident < budget.slots:
        assert in_memory + (layers - 1) * one > 0.1 * machine.memory_bytes


def test_a_given_limit_of_memory_holds_on_every_machine():
    for preset in ("h100x8", "laptop"):
        assert plan_budget(PlanSettings(memory_gib=1.5), cluster_preset(preset, 4)).memory_gib == 1.5


def test_a_run_chooses_its_dispatch_or_takes_that_of_the_machine():
    flat = cluster_preset("h100x8", 16)
    hierarchical = replace(flat, dispatch="hierarchical")
    assert [PlanSettings().dispatch_on(machine) for machine in (flat, hierarchical)] == ["flat", "hierarchical"]
    assert PlanSettings(dispatch="hierarchical").dispatch_on(flat) == "hierarchical"
    assert PlanSettings(dispatch="flat").dispatch_on(hierarchical) == "flat"
    assert PlanSettings(dispatch="hierarchical", sums="canonical").dispatch_on(flat) == "flat"
