"""Simulated training steps and RL iterations on clusters of any size, from a plan, a model and a machine.

model_shape, ModelShape       sizes of a model; `model_shape_from_config` reads a config.json, `cut_model` keeps a part
simulate_step                 one training step under a plan; `simulate_groups`: of many expert-parallel groups;
                              `with_mini_batches`: of a schedule with mini-batches
Execution, ParallelLayout     pipeline stages, mini-batches, overlap; how ranks are numbered
simulated_timeline            events of a simulated step, as the executor records them
memory_use, step_limits       does it fit, and what limits it; `memory_for_slots`: what slots may take;
                              `overlap_ratio` needs no simulation; `choose_kept_activations`: what layers keep
simulate_rollout              the stage before a training step; `training_passes` puts an iteration together
"""

from relibra.simulation.kept_activations import choose_kept_activations
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.limits import StepLimit, overlap_ratio, step_limits
from relibra.simulation.memory import MemoryUse, memory_for_slots, memory_use
from relibra.simulation.model_shape import (
    MODEL_SHAPES,
    ModelShape,
    counted_model_shape,
    cut_model,
    model_shape,
    model_shape_from_config,
)  # fmt: skip
from relibra.simulation.rollout import Engines, LengthDistribution, SimulatedRollout, simulate_rollout
from relibra.simulation.step.group_run import Execution
from relibra.simulation.step.step_result import SimulatedStep
from relibra.simulation.step.step_timeline import simulated_timeline
from relibra.simulation.step.training_step import simulate_groups, simulate_step, with_mini_batches

__all__ = [
    "MODEL_SHAPES", "Engines", "Execution", "LengthDistribution", "MemoryUse", "ModelShape", "ParallelLayout",
    "SimulatedRollout", "SimulatedStep", "StepLimit", "choose_kept_activations", "counted_model_shape", "cut_model",
    "memory_for_slots", "memory_use", "model_shape", "model_shape_from_config", "overlap_ratio", "simulate_groups",
    "simulate_rollout", "simulate_step", "simulated_timeline", "step_limits", "with_mini_batches",
]  # fmt: skip
