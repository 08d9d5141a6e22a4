"""`plan_budget`: what the settings of a run let a plan use. Imports no torch: benchmarks plan as training does."""

from __future__ import annotations

from relibra.planning.budget import Budget
from relibra.rl.config.settings import PlanSettings


def plan_budget(settings: PlanSettings) -> Budget:
    """Return the budget of a step."""
    return Budget(
        slots=settings.slots,
        memory_gib=settings.memory_gib,
        move_homes=settings.move_homes,
        pack_samples=settings.pack and settings.sums == "fast",
        tolerance=settings.tolerance,
        steps_served=settings.steps_served,
        gradient_wire=settings.gradient_wire,
    )
