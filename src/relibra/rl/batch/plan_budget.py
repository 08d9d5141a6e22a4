"""`plan_budget`: what the settings of a run let a plan use. Imports no torch: benchmarks plan as training does."""

from __future__ import annotations

from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.rl.config.settings import PlanSettings


def plan_budget(settings: PlanSettings, num_layers: int, expert: ExpertShape) -> Budget:
    """Return the budget of a step.

    num_layers   of the whole model: `plan.memory_gib` is shared by the slots of all layers
    """
    may_pack = settings.pack and settings.sums == "fast"
    return Budget(
        slots=settings.slots,
        objective=settings.objective,
        move_homes=settings.move_homes,
        pack_samples=may_pack,
        place_samples=may_pack,
        cross_node_copies=settings.objective == "seconds",
        tolerance=settings.tolerance,
    )
