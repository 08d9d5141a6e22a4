"""Planning: homes, schedule and replicas of a step. Start with `plan_step`; names load on first use.

What decides, in the balancer "relibra":

homes of experts          `choose_homes`; `cheapest_layers` takes the new homes of a layer or keeps the old ones
                          (`balancers/layer_plans.py`); `plan_step` may take old or static homes without replicas
numbers of slots          `decide` (`balancers/relibra.py`)
samples of micro-batches  `decide`: those of the given schedule or those of `pack_groups` (`levers/packing.py`)
replicas, their tokens    `keep_replicas` (`levers/resident_replicas.py`); in shared slots `replicate`
                          (`levers/replication.py`)
seconds of all of these   `layer_costs` (`costs/layer_costs.py`)

Why an expert moved: `relibra explain runs/X/traces/step-N/plan.safetensors --layer L`; `considered` has the seconds of
each choice in the layer, `moved` the loads before and after.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "BALANCERS": "relibra.planning.registry",
    "Budget": "relibra.planning.budget",
    "ExpertShape": "relibra.planning.costs.expert_shape",
    "Prediction": "relibra.planning.costs.prediction",
    "StepPlan": "relibra.planning.plan",
    "diff": "relibra.planning.analysis.explanation",
    "expert_shape": "relibra.planning.costs.expert_shape",
    "plan_step": "relibra.planning.planner",
    "predict": "relibra.planning.costs.prediction",
    "read_plan": "relibra.planning.plan_files",
    "write_plan": "relibra.planning.plan_files",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'relibra.planning' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
