"""A planned step on two nodes, small enough for every test and large enough to have hot experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relibra.cluster import cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.reporting.data.compared_plans import ComparedPlan, ComparedStep, compare_plan, compare_static
from relibra.reporting.data.comparison import ComparisonRow, iterate_comparison
from relibra.routing.demand import Demand
from relibra.simulation import model_shape

CLUSTER = cluster_preset("h100x8", 4, 2)
EXPERT = expert_shape("qwen3-30b-a3b")


def planned_step(layers: int = 3, *, slots: int = 1) -> tuple[StepPlan, Demand]:
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(16, 0.5), layers)
    counts_SLE = np.stack([rng.multinomial(4 * 64, popularity[layer], 40) for layer in range(layers)], axis=1)
    demand = Demand(
        counts_SLE=counts_SLE.astype(np.int32), layer_ids=np.arange(1, layers + 1), sample_ids=np.arange(40), top_k=4
    )
    demand = demand.with_schedule(np.arange(40) % 5, np.arange(40) // 5 % 4, 4)
    budget = Budget(slots=slots)
    plan = plan_step(demand, CLUSTER, budget, "relibra_paper_tokens", expert=EXPERT, never_worse=False)
    return plan, demand


def compared_plans(layers: int = 3) -> tuple[ComparedPlan, ComparedPlan]:
    plan, demand = planned_step(layers)
    return compare_static(plan, demand), compare_plan("the plan", plan, demand)


def compared_step(before: ComparedPlan | None = None, after: ComparedPlan | None = None) -> ComparedStep:
    """The static layout and the plan of `planned_step`, or two given plans."""
    if before is None or after is None:
        before, after = compared_plans()
    layers = len(after.plan.layer_ids)
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=layers, experts=16, top_k=4)
    return ComparedStep(before=before, after=after, cluster=CLUSTER, model=model)


def compare(*given, **options) -> list[ComparisonRow]:
    """The rows of `iterate_comparison`."""
    return [row for row, _ in iterate_comparison(*given, **options)]
