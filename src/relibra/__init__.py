"""relibra: RL post-training of mixture-of-experts models, with experts balanced from the routes of the rollout.

Importing the package imports nothing heavy: names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relibra.cluster import Cluster as Cluster
    from relibra.cluster import cluster_preset as cluster_preset
    from relibra.errors import ClusterError as ClusterError
    from relibra.errors import ConfigError as ConfigError
    from relibra.errors import EngineError as EngineError
    from relibra.errors import PlanError as PlanError
    from relibra.errors import RelibraError as RelibraError
    from relibra.errors import TraceError as TraceError
    from relibra.parallel import execute_plan as execute_plan
    from relibra.parallel import relocate as relocate
    from relibra.planning.analysis.explanation import explain_plan as explain_plan
    from relibra.planning.budget import Budget as Budget
    from relibra.planning.costs.expert_shape import ExpertShape as ExpertShape
    from relibra.planning.costs.expert_shape import expert_shape as expert_shape
    from relibra.planning.placement import Homes as Homes
    from relibra.planning.placement import Placement as Placement
    from relibra.planning.plan import StepPlan as StepPlan
    from relibra.planning.plan_files import read_plan as read_plan
    from relibra.planning.plan_files import write_plan as write_plan
    from relibra.planning.planner import plan_step as plan_step
    from relibra.planning.validation import validate_plan as validate_plan
    from relibra.replay import BatchRoutes as BatchRoutes
    from relibra.replay import record_routing as record_routing
    from relibra.replay import replay_routing as replay_routing
    from relibra.routing.demand import Demand as Demand
    from relibra.routing.demand import ScheduledDemand as ScheduledDemand
    from relibra.routing.sampler_check import SampledTokens as SampledTokens
    from relibra.routing.sampler_check import SamplerHistory as SamplerHistory
    from relibra.routing.sampler_check import check_sampler as check_sampler
    from relibra.routing.sampler_check import sampler_sums as sampler_sums
    from relibra.routing.synthetic import demo_demand as demo_demand
    from relibra.routing.trace import RoutingTrace as RoutingTrace
    from relibra.routing.trace_files import iterate_trace as iterate_trace
    from relibra.routing.trace_files import read_trace as read_trace
    from relibra.routing.trace_files import write_trace as write_trace
    from relibra.simulation import choose_kept_activations as choose_kept_activations
    from relibra.simulation import simulate_step as simulate_step

__version__ = "0.2.0"

_NAMES = {
    "relibra.cluster": "Cluster cluster_preset",
    "relibra.errors": "ClusterError ConfigError EngineError PlanError RelibraError TraceError",
    "relibra.parallel": "execute_plan relocate",
    "relibra.planning.analysis.explanation": "explain_plan",
    "relibra.planning.budget": "Budget",
    "relibra.planning.costs.expert_shape": "ExpertShape expert_shape",
    "relibra.planning.placement": "Homes Placement",
    "relibra.planning.plan": "StepPlan",
    "relibra.planning.plan_files": "read_plan write_plan",
    "relibra.planning.planner": "plan_step",
    "relibra.planning.validation": "validate_plan",
    "relibra.replay": "BatchRoutes record_routing replay_routing",
    "relibra.routing.demand": "Demand ScheduledDemand",
    "relibra.routing.sampler_check": "SampledTokens SamplerHistory check_sampler sampler_sums",
    "relibra.routing.synthetic": "demo_demand",
    "relibra.routing.trace": "RoutingTrace",
    "relibra.routing.trace_files": "iterate_trace read_trace write_trace",
    "relibra.simulation": "choose_kept_activations simulate_step",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*sorted(_WHERE), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'relibra' has no attribute {name!r}")
    from relibra.errors import missing_packages

    with missing_packages(f"relibra.{name}"):
        module = import_module(_WHERE[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
