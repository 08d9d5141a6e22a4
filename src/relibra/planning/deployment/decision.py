"""`Decision`: the best deployment with attention and experts apart, the best without, and which of both to choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relibra.errors import PlanError
from relibra.planning.deployment.accelerator import Accelerator
from relibra.planning.deployment.colocated import ColocatedPlan, Kind, search_colocated
from relibra.planning.deployment.deployment_plan import DeploymentPlan, Objective
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import SearchSpace, search_pairs
from relibra.planning.deployment.served_model import ServedModel
from relibra.planning.deployment.service_level import MOST_SECONDS, ServiceLevel
from relibra.printable import plural


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
        """Return tokens per second and unit of the objective, without filling and draining on either side."""
        return float(plan.steady_tokens_per_second / getattr(plan, self.objective))


def decide(
    model: ServedModel, level: ServiceLevel, gpus: Sequence[Accelerator], space: SearchSpace, efficiency: Efficiency
) -> Decision:
    """Search deployments with and without separation under the same formulas; raises PlanError when nothing fits."""
    decision = _search(model, level, gpus, space, efficiency)
    if not decision.pairs and not decision.colocated:

        def fits(level: ServiceLevel, space: SearchSpace) -> bool:
            found = _search(model, level, gpus, space, efficiency)
            return bool(found.pairs or found.colocated)

        limit = "" if not space.most_gpus else f" of at most {plural(space.most_gpus, 'GPU')}"
        raise PlanError(
            f"no deployment{limit} of {model.name!r} on {', '.join(gpu.name for gpu in gpus)} answers within "
            f"{level.seconds_per_token:g} s per token with a context of {level.context:g}: {remedy(level, space, fits)}"
        )
    best = tuple(sorted(decision.colocated, key=lambda plan: (-decision.figure(plan), plan.kind)))
    return replace(decision, colocated=best)


def remedy(level: ServiceLevel, space: SearchSpace, fits: Callable[[ServiceLevel, SearchSpace], bool]) -> str:
    """Return what to change where nothing fits: the limit without which something would.

    fits   whether there is a deployment within a level and a space
    """
    slow, large = replace(level, seconds_per_token=MOST_SECONDS), replace(space, most_gpus=0)
    wider = fits(level, large) if space.most_gpus else False
    if fits(slow, space):
        return "allow more time per token, or more GPUs" if wider else "allow more time per token"
    if wider:
        return "allow more GPUs"
    if space.most_gpus and fits(slow, large):
        return "allow more time per token, and more GPUs"
    if fits(replace(slow, context=1.0), large):
        return "the memory of these accelerators holds no request of this context: ask for less context, or name others"
    return "the model does not fit their memory: name accelerators with more"


def _search(
    model: ServedModel, level: ServiceLevel, gpus: Sequence[Accelerator], space: SearchSpace, efficiency: Efficiency
) -> Decision:
    pairs = search_pairs(model, level, gpus, space, efficiency)
    kinds: tuple[Kind, ...] = ("tensor", "expert")
    best = [search_colocated(model, level, gpus, space.objective, efficiency, (one,), space.most_gpus) for one in kinds]
    found = [plan for plan in best if plan is not None]
    return Decision(pairs=tuple(pairs), colocated=tuple(found), objective=space.objective)
