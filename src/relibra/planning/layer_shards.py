"""Planning by layers under a fixed schedule: cut a demand by layers, join the plans of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int64, Integer
from numpy import ndarray

from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand


def layers_of_rank(num_layers: int, rank: int, num_ranks: int) -> Int64[ndarray, " l"]:
    """Return the layers that a rank plans, as positions on the layer axis; may be empty."""
    return np.array_split(np.arange(num_layers), num_ranks)[rank]


def demand_of_layers(demand: ScheduledDemand, layers: Int64[ndarray, " l"]) -> ScheduledDemand:
    """Return the demand of some layers, with its schedule."""
    return replace(
        demand,
        counts_SLE=demand.counts_SLE[:, layers],
        layer_ids=demand.layer_ids[layers],
        tokens_MLRE=demand.tokens_MLRE[:, layers],
        pairs_LEE=None if demand.pairs_LEE is None else demand.pairs_LEE[layers],
    )


def join_layers(parts: Sequence[StepPlan], demand: ScheduledDemand) -> StepPlan:
    """Join plans of consecutive layers under one schedule into the plan of all of them.

    Parts are planned in parallel: `plan_seconds` is that of the slowest. Nothing is predicted. Parts may have different
    slots, where a balancer keeps the layout without replicas in some layers, or "auto" takes several balancers: the
    plan has as many as the widest, and those that are resident in any part.

    demand   of all layers
    """
    first = parts[0]
    assert all(np.array_equal(part.micro_batch_S, first.micro_batch_S) for part in parts), "parts share a schedule"
    assert all(np.array_equal(part.rank_S, first.rank_S) for part in parts), "parts share a schedule"
    slots = max(part.slots for part in parts)
    names = list(dict.fromkeys(part.balancer for part in parts))
    return replace(
        first,
        balancer=" + ".join(names),
        layer_ids=np.concatenate([part.layer_ids for part in parts]),
        physical_to_logical_map=np.concatenate([part.physical_to_logical_map for part in parts]),
        previous_map=np.concatenate([part.previous_map for part in parts]),
        replica_MLRB=np.concatenate([_widened(part.replica_MLRB, slots, -1) for part in parts], axis=1),
        quota_MLRB=np.concatenate([_widened(part.quota_MLRB, slots, 0) for part in parts], axis=1),
        bound_ML=np.concatenate([part.bound_ML for part in parts], axis=1),
        resident_slots=max(part.resident_slots for part in parts),
        scope="cluster" if any(part.scope == "cluster" for part in parts) else "node",
        predicted={},
        plan_seconds=max(part.plan_seconds for part in parts),
        demand_digest=demand.digest(),
        cut_short=any(part.cut_short for part in parts),
    )


def _widened(array_MLRB: Integer[ndarray, "M L R B"], slots: int, empty: int) -> Integer[ndarray, "M L R X"]:
    """Return the array with empty slots appended, so that there are `slots` of them."""
    missing = slots - array_MLRB.shape[-1]
    return np.pad(array_MLRB, ((0, 0), (0, 0), (0, 0), (0, missing)), constant_values=empty)
