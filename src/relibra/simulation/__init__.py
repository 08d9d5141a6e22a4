"""Clusters nobody has at hand: training steps and RL iterations as events, from a plan, a model and a machine."""

from relibra.simulation.group_run import Execution
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import MODEL_SHAPES, ModelShape, model_shape, model_shape_from_config
from relibra.simulation.step_result import SimulatedStep
from relibra.simulation.step_timeline import simulated_timeline
from relibra.simulation.timeline_difference import TimelineDifference, diff_timelines
from relibra.simulation.training_step import simulate_groups, simulate_step

__all__ = [
    "MODEL_SHAPES",
    "Execution",
    "ModelShape",
    "ParallelLayout",
    "SimulatedStep",
    "TimelineDifference",
    "diff_timelines",
    "model_shape",
    "model_shape_from_config",
    "simulate_groups",
    "simulate_step",
    "simulated_timeline",
]
