"""What the settings of a run let a plan use."""

from dataclasses import replace

import numpy as np
import pytest

from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.rl.batch.plan_budget import plan_budget, slot_memory
from relibra.rl.config.run_config import load_config
from relibra.rl.config.settings import PlanSettings
from relibra.routing.demand import Demand
from relibra.simulation import Execution, memory_for_slots, model_shape


def test_defaults_of_runs_are_those_of_plans():
    assert plan_budget(PlanSettings(), 7.0) == Budget(memory_gib=7.0)
    assert plan_budget(PlanSettings(memory_gib=1.5), 7.0).memory_gib == 1.5
    assert not plan_budget(PlanSettings(sums="canonical"), 7.0).pack_samples


def test_copies_and_a_value_model_leave_less_for_slots():
    model, machine = replace(model_shape("deepseek-v2-lite"), vocabulary=8192), cluster_preset("h100x8", 8)
    counts_SLE = np.full((16, model.moe_layers, model.experts), 96, dtype=np.int32)
    layers, samples = np.arange(model.moe_layers, dtype=np.int32), np.arange(16)
    demand = Demand(counts_SLE=counts_SLE, layer_ids=layers, sample_ids=samples, top_k=model.top_k)
    scheduled = demand.with_schedule(samples // 8, samples % 8, 8, 2)

    def memory(*settings):
        return slot_memory(load_config(None, ["parallel.ranks=8", *settings]), scheduled, machine, model)

    copy = model.parameters * 2 / 2**30
    how = Execution(recompute_activations=False)  # of the built-in model
    alone = memory_for_slots(scheduled, machine, model, how)
    assert memory() == pytest.approx(alone - copy)
    assert memory("algorithm.kl_coefficient=0.01") == pytest.approx(max(0.0, alone - copy - 2 * copy / 8))
    assert memory("algorithm.preset=ppo") == pytest.approx(max(0.0, alone - copy - 8 * copy / 8))
    assert memory("update.activations=recompute") > memory()


def test_a_run_chooses_its_dispatch_or_takes_that_of_the_machine():
    flat = cluster_preset("h100x8", 16)
    hierarchical = replace(flat, dispatch="hierarchical")
    assert [PlanSettings().dispatch_on(machine) for machine in (flat, hierarchical)] == ["flat", "hierarchical"]
    assert PlanSettings(dispatch="hierarchical").dispatch_on(flat) == "hierarchical"
    assert PlanSettings(dispatch="flat").dispatch_on(hierarchical) == "flat"
    assert PlanSettings(dispatch="hierarchical", sums="canonical").dispatch_on(flat) == "flat"
