"""`LoadCubes`: loads of ranks and of experts under two plans, relative to their mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.reporting.data.compared_plans import ComparedPlan, ComparedStep, times_mean


class LoadCubes(NamedTuple):
    """Load / mean over the rows (ranks or experts) of one micro-batch and layer.

    plans     an array [M, L, X] for each plan; an expert with replicas has the load of its busiest instance
    end       where the colour scale ends: the 99th percentile of the busiest rows, at least 2
    largest   the largest value of both plans
    """

    plans: tuple[Float64[ndarray, "M L X"], ...]
    end: float
    largest: float


def rank_cubes(step: ComparedStep) -> LoadCubes:
    """Return the loads of ranks."""
    return _scaled(tuple(times_mean(one.rank_load_MLR) for one in step.plans))


def expert_cubes(step: ComparedStep) -> LoadCubes:
    """Return the loads of experts."""
    return _scaled(tuple(_instances_times_mean(one) for one in step.plans))


def _scaled(plans: tuple[Float64[ndarray, "M L X"], ...]) -> LoadCubes:
    end = max(2.0, *(float(np.quantile(cube.max(axis=-1), 0.99)) for cube in plans))
    return LoadCubes(plans, end, max(float(cube.max()) for cube in plans))


def _instances_times_mean(one: ComparedPlan) -> Float64[ndarray, "M L E"]:
    load_MLE = one.demand.load_MLE
    mean_ML1 = load_MLE.mean(axis=-1, keepdims=True)
    return np.divide(one.instance_load_MLE(), mean_ML1, out=np.ones(load_MLE.shape), where=mean_ML1 > 0)
