"""Simulated training steps and RL iterations on clusters of any size, from a plan, a model and a machine.

model_shape, ModelShape       sizes of a model; `model_shape_from_config` reads a config.json, `cut_model` keeps a part
simulate_step                 one training step under a plan; `simulate_groups`: of many expert-parallel groups;
                              `with_mini_batches`: of a schedule with mini-batches
Execution, ParallelLayout     pipeline stages, mini-batches, overlap; how ranks are numbered
simulated_timeline            its events, as the executor records them; `diff_timelines` compares two
memory_use, step_limits       does it fit, and what limits it; `memory_for_slots`: what slots may take;
                              `overlap_ratio` needs no simulation; `choose_kept_activations`: what layers keep
simulate_rollout, rl_iteration, speedup   the stages around a training step (docs/simulation.md)
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
from relibra.simulation.rl_iteration import (
    Engines,
    RlIteration,
    SimulatedRollout,
    Speedup,
    end_to_end_speedup,
    needed_stage_speedup,
    rl_iteration,
    simulate_rollout,
    simulate_windowed_rollout,
    speedup,
)  # fmt: skip
from relibra.simulation.rollout import LengthDistribution
from relibra.simulation.step.group_run import Execution
from relibra.simulation.step.step_result import SimulatedStep
from relibra.simulation.step.step_timeline import simulated_timeline
from relibra.simulation.step.timeline_difference import TimelineDifference, diff_timelines
from relibra.simulation.step.training_step import simulate_groups, simulate_step, with_mini_batches

__all__ = [
    "MODEL_SHAPES", "Engines", "Execution", "LengthDistribution", "MemoryUse", "ModelShape", "ParallelLayout",
    "RlIteration", "SimulatedRollout", "SimulatedStep", "Speedup", "StepLimit", "TimelineDifference",
    "choose_kept_activations", "counted_model_shape", "cut_model", "diff_timelines", "end_to_end_speedup",
    "memory_for_slots", "memory_use", "model_shape", "model_shape_from_config", "needed_stage_speedup",
    "overlap_ratio", "rl_iteration", "simulate_groups", "simulate_rollout", "simulate_step",
    "simulate_windowed_rollout", "simulated_timeline", "speedup", "step_limits", "with_mini_batches",
]  # fmt: skip
