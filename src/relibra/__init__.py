"""relibra: RL post-training of mixture-of-experts models, with experts balanced from the routes of the rollout.

Importing the package imports nothing heavy: names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_WHERE = {
    "Budget": "relibra.planning.budget",
    "Cluster": "relibra.cluster",
    "Demand": "relibra.routing.demand",
    "ScheduledDemand": "relibra.routing.demand",
    "Homes": "relibra.planning.placement",
    "Placement": "relibra.planning.placement",
    "StepPlan": "relibra.planning.plan",
    "cluster_preset": "relibra.cluster",
    "explain_plan": "relibra.planning.analysis.explanation",
    "validate_plan": "relibra.planning.validation",
    "plan_step": "relibra.planning.planner",
    "read_plan": "relibra.planning.plan_files",
    "write_plan": "relibra.planning.plan_files",
    "RoutingTrace": "relibra.routing.trace",
    "ClusterError": "relibra.errors",
    "ConfigError": "relibra.errors",
    "EngineError": "relibra.errors",
    "PlanError": "relibra.errors",
    "RelibraError": "relibra.errors",
    "TraceError": "relibra.errors",
    "iterate_trace": "relibra.routing.trace_files",
    "read_trace": "relibra.routing.trace_files",
    "record_routing": "relibra.replay",
    "replay_routing": "relibra.replay",
    "write_trace": "relibra.routing.trace_files",
}

__all__ = [*sorted(_WHERE), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'relibra' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
