"""`Decision`: the best deployment with attention and experts apart, the best without, and which of both to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relibra.errors import PlanError
from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.colocated import ColocatedPlan, Kind, search_colocated
from relibra.planning.deployment.deployment_plan import DeploymentPlan, Objective
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import SearchSpace, search_pairs
from relibra.planning.deployment.served_model import ServedModel
from relibra.planning.deployment.service_level import ServiceLevel


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Plans of a search.

    pairs        best plan of each pair of accelerators, best first
    colocated    best plans without separation, one per kind that fits, best first
    objective    what both were chosen by
    """

    pairs: tuple[DeploymentPlan, ...]
    colocated: tuple[ColocatedPlan, ...]
    objective: Objective

    @property
    def best(self) -> DeploymentPlan | None:
        """Return the best plan with separation; None: none fits."""
        return self.pairs[0] if self.pairs else None

    @property
    def gain(self) -> float | None:
        """Return tokens per unit with separation / without; None where one of both does not fit."""
        if not self.pairs or not self.colocated:
            return None
        return self.figure(self.pairs[0]) / self.figure(self.colocated[0])

    @property
    def disaggregate(self) -> bool:
        """Return whether separation gives more tokens per unit, or is all that fits."""
        return bool(self.pairs) and (self.gain is None or self.gain > 1)

    def figure(self, plan: DeploymentPlan | ColocatedPlan) -> float:
        """Return tokens per second and unit of the objective while micro-batches run on, for both kinds of plans."""
        return float(plan.steady_tokens_per_second / getattr(plan, self.objective))


def decide(
    model: ServedModel, level: ServiceLevel, gpus: Sequence[Accelerator], space: SearchSpace, efficiency: Efficiency
) -> Decision:
    """Search deployments with and without separation under the same formulas; raises PlanError when nothing fits."""
    pairs = search_pairs(model, level, gpus, space, efficiency)
    kinds: tuple[Kind, ...] = ("tensor", "expert")
    most = 1 if efficiency.measured else space.most_gpus  # messages between colocated nodes are not measured
    best = [search_colocated(model, level, gpus, space.objective, efficiency, (one,), most) for one in kinds]
    found = [plan for plan in best if plan is not None]
    decision = Decision(pairs=tuple(pairs), colocated=(), objective=space.objective)
    if not pairs and not found:
        raise PlanError(
            f"no deployment of {model.name!r} on {', '.join(gpu.name for gpu in gpus)}",
            allowed=f"none answers within {level.seconds_per_token:g} s per token with a context of {level.context:g}"
            + (f" on at most {space.most_gpus} GPUs" if space.most_gpus else ""),
            next_step="allow more time per token, more GPUs or less context, or name accelerators with more memory",
        )
    return replace(decision, colocated=tuple(sorted(found, key=lambda plan: (-decision.figure(plan), plan.kind))))
