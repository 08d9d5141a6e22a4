"""`plan_budget`: what the settings of a run let a plan use. Imports no torch: benchmarks plan as training does."""

from __future__ import annotations

from relibra.cluster import Cluster
from relibra.planning.budget import Budget, slot_memory_gib
from relibra.rl.config.settings import PlanSettings


def plan_budget(settings: PlanSettings, cluster: Cluster) -> Budget:
    """Return the budget of a step on a machine."""
    may_pack = settings.pack and settings.sums == "fast"
    return Budget(
        slots=settings.slots,
        memory_gib=slot_memory_gib(cluster) if settings.memory_gib is None else settings.memory_gib,
        objective=settings.objective,
        move_homes=settings.move_homes,
        pack_samples=may_pack,
        place_samples=may_pack,
        cross_node_copies=settings.objective == "seconds",
        tolerance=settings.tolerance,
        steps_served=settings.steps_served,
        static_rows=settings.static_rows,
    )
