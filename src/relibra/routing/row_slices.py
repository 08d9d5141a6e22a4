"""`RowSlice`: rows of a sample that one rank feeds; `demand_of_slices`: a demand in which ranks share samples.

`Demand.with_schedule` gives each sample one source rank. Where tensor or context parallelism cuts samples, each piece
has a rank of its own: the pieces are the demand's entries, with the id of their sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Integer
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import check_array_size
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots

FILLER = -1
"""Sample id of rows that belong to no sample, such as padding: they are computed too."""


class RowSlice(NamedTuple):
    """Rows that one rank feeds in one micro-batch.

    sample_id     of the sample that they belong to; FILLER: of none
    experts_TLK   logical experts of each row
    """

    sample_id: int
    micro_batch: int
    rank: int
    experts_TLK: Integer[ndarray, "T L K"]


def demand_of_slices(
    slices: Sequence[RowSlice],
    *,
    num_experts: int,
    num_ranks: int,
    num_micro_batches: int,
    layer_ids: Int[ndarray, " L"],
) -> ScheduledDemand:
    """Return the demand of slices under their schedule: one entry per slice, in their order.

    Plans for it keep the schedule (`Budget(place_samples=False, pack_samples=False)`): slices of a sample stay where
    the parallelism of the trainer puts them.

    layer_ids   absolute decoder layer of each entry of the layer axis
    raises      TraceError when there is no slice, slices have other layers or choices, or ids are out of range
    """
    if not slices:
        raise TraceError("no rows to count: pass the slices of all ranks and micro-batches")
    shapes = {one.experts_TLK.shape[1:] for one in slices}
    if len(shapes) > 1 or next(iter(shapes))[0] != len(layer_ids):
        raise TraceError(f"slices have (layers, choices) {sorted(shapes)}, and {len(layer_ids)} layers are named")
    L, top_k = next(iter(shapes))
    routes = sum(one.experts_TLK.nbytes for one in slices)
    check_array_size("token-slots of slices", 4, routes, slices=len(slices), layers=L, experts=num_experts)
    counts_YLE = np.zeros((len(slices), L, num_experts), dtype=np.int32)
    for y, (_, _, _, experts_TLK) in enumerate(slices):
        all_T = np.ones(len(experts_TLK), dtype=bool)
        counts_YLE[y] = count_token_slots(experts_TLK, all_T, np.array([0, len(experts_TLK)]), num_experts)[0]
    demand = Demand(
        counts_SLE=counts_YLE,
        layer_ids=layer_ids,
        sample_ids=np.array([one.sample_id for one in slices], dtype=np.int64),
        top_k=top_k,
    )
    return demand.with_schedule(
        np.array([one.micro_batch for one in slices]),
        np.array([one.rank for one in slices]),
        num_ranks,
        num_micro_batches,
    )
