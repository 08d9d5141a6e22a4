"""Loads before and after a plan, for any layer and any micro-batch, as loads.js draws them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.reporting.data.compared_plans import ComparedStep, times_mean
from relibra.reporting.data.summary import evenly_chosen

MAX_BYTES = 2_000_000
"""Limit for all pictures before base64: 2 bytes per rank and expert, for each micro-batch and layer."""


def load_facts(step: ComparedStep) -> dict[str, Any]:
    """Return layer ids, scales, and for each plan cubes [micro-batch, layer, row] of load / mean over its rows.

    An expert with replicas has the load of its busiest instance. "scales" holds, for ranks and for experts, the largest
    load, and where colours end: at the 99th percentile of the busiest rows, at least 2. "first" holds the indices of
    the layer and the micro-batch to begin with: the most improved ones.
    """
    L, R, E = len(step.before.plan.layer_ids), step.before.plan.num_ranks, step.before.plan.num_experts
    room = max(1, MAX_BYTES // (4 * L * (R + E)))
    shown = [evenly_chosen(len(one.plan.replica_MLRB), room) for one in step.plans]
    cubes = {
        "ranks": [times_mean(one.rank_load_MLR) for one in step.plans],
        "experts": [times_mean(one.demand.load_MLE, of=one.instance_load_MLE()) for one in step.plans],
    }
    largest = {rows: max(float(one.max()) for one in found) for rows, found in cubes.items()}
    ends = {
        rows: max(2.0, *(float(np.quantile(one.max(axis=-1), 0.99)) for one in found)) for rows, found in cubes.items()
    }
    m, layer = step.most_improved()
    return {
        "layers": step.before.plan.layer_ids.tolist(),
        "scales": {rows: {"end": ends[rows], "largest": largest[rows]} for rows in cubes},
        "ranks_per_node": step.before.plan.ranks_per_node,
        "first": [layer, int(np.abs(np.array(shown[0]) - m).argmin())],
        "plans": [
            {
                "name": one.name,
                "micro_batches": shown[i],
                **{rows: _pack(found[i][shown[i]], largest[rows]) for rows, found in cubes.items()},
            }
            for i, one in enumerate(step.plans)
        ],
    }


def _pack(times: Float64[ndarray, "M L X"], largest: float) -> dict[str, Any]:
    """Return loads / mean as base64 of little-endian numbers of 16 bits, of which 65535 is the largest load."""
    data = np.rint(times * (65535 / largest)).astype("<u2")
    return {"shape": list(times.shape), "largest": largest, "data": base64.b64encode(data.tobytes()).decode()}
