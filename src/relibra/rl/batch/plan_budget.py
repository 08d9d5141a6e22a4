"""`plan_budget`: what the settings of a run let a plan use. Imports no torch: benchmarks plan as training does."""

from __future__ import annotations

from relibra.cluster import Cluster
from relibra.planning.budget import Budget
from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import PlanSettings
from relibra.routing.demand import ScheduledDemand
from relibra.simulation import Execution, ModelShape, memory_for_slots


def plan_budget(settings: PlanSettings, memory_gib: float) -> Budget:
    """Return the budget of a step.

    memory_gib   most for slots (`slot_memory`); the settings may allow less
    """
    return Budget(
        slots=settings.slots,
        memory_gib=memory_gib if settings.memory_gib is None else min(memory_gib, settings.memory_gib),
        move_homes=settings.move_homes,
        pack_samples=settings.pack and settings.sums == "fast",
        tolerance=settings.tolerance,
        steps_served=settings.steps_served,
        gradient_wire=settings.gradient_wire,
    )


def slot_memory(config: RunConfig, demand: ScheduledDemand, cluster: Cluster, model: ModelShape) -> float:
    """Return the GiB that the trained model of a run leaves for slots, the same on all ranks and in a resumed run.

    Beside it a rank holds a full copy if it samples, and its parts of the reference policy and of a value model.
    """
    samples = config.rollout.engine == "embedded"
    copy_bytes = 4 if config.lora.rank else model.expert.bytes_per_value  # adapters are merged in float32
    held_bytes = float(model.parameters * copy_bytes) if samples else 0.0
    if config.update.offload == "off":  # else they are on the host while the policy is trained
        shard = model.parameters / cluster.num_ranks
        held_bytes += model.expert.bytes_per_value * shard * (config.algorithm.kl_coefficient > 0)
        held_bytes += _TRAINED_BYTES * shard * (config.algorithm.advantage == "gae")
    how = Execution(recompute_activations=config.update.activations != "keep")
    return memory_for_slots(demand, cluster, model, how, held_bytes=held_bytes)


_TRAINED_BYTES = 16.0
"""Bytes of a float32 weight with its gradient and two moments."""
