"""Rows of a demand: `demand_of_slices` counts one in which ranks share samples, `sample_of_rows` finds rows again.

`Demand.with_schedule` gives each sample one source rank. Where tensor or context parallelism cuts samples, each piece
has a rank of its own: the pieces are the demand's entries, with the id of their sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64, Integer
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots
from relibra.routing.trace import RoutingTrace

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
    raises      TraceError when there is no slice, slices differ in layers or choices, or ids are illegal
    """
    if not slices:
        raise TraceError("no rows to count: pass the slices of all ranks and micro-batches")
    trace = RoutingTrace.from_samples(
        [one.experts_TLK for one in slices],
        num_experts=num_experts,
        layer_ids=layer_ids.tolist(),
        sample_ids=[one.sample_id for one in slices],
    )
    return Demand.from_trace(trace).with_schedule(
        np.array([one.micro_batch for one in slices]),
        np.array([one.rank for one in slices]),
        num_ranks,
        num_micro_batches,
    )


def sample_of_rows(trace: RoutingTrace, demand: Demand) -> Int64[ndarray, " T"]:
    """Return, for each row of a trace, the position of its sample in the demand; -1: in none, or not valid.

    A sample of the demand is a whole sample of the trace or consecutive rows of one; pieces of one sample follow each
    other without gaps. If several start rows have the counts of the demand, the sample's first row is preferred, then
    the last possible one. Raises TraceError when the demand was not counted from this trace.
    """
    result_T = np.full(trace.num_rows, -1, dtype=np.int64)
    place_of_id = {sample: s for s, sample in enumerate(np.asarray(trace.sample_ids).tolist())}
    if len(place_of_id) < trace.num_samples or not np.array_equal(trace.layer_ids, demand.layer_ids):
        raise TraceError(_mismatch_message("it repeats sample ids, or its layers differ"))
    pieces: dict[int, list[int]] = {}
    for s, sample in enumerate(demand.sample_ids.tolist()):
        pieces.setdefault(sample, []).append(s)
    for sample, parts in pieces.items():
        if sample not in place_of_id:
            raise TraceError(_mismatch_message(f"sample {sample} is not in it"))
        start, stop = trace.offsets[place_of_id[sample] : place_of_id[sample] + 2]
        rows = start + np.flatnonzero(trace.valid_T[start:stop])
        lengths = demand.counts_SLE[parts, 0].sum(axis=1, dtype=np.int64) // trace.top_k
        where = _find_start(trace, demand, rows, parts, lengths)
        if where < 0:
            raise TraceError(_mismatch_message(f"sample {sample} has other counts"))
        result_T[rows[where : where + int(lengths.sum())]] = np.repeat(parts, lengths)
    return result_T


def _find_start(trace: RoutingTrace, demand: Demand, rows: ndarray, parts: list[int], lengths: ndarray) -> int:
    """Return a place in `rows` from which the parts have their counts: 0, the last, or the first other; -1: none."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    last = len(rows) - int(bounds[-1])
    for where in dict.fromkeys([0, last, *range(last)]) if last >= 0 else ():
        chosen_TLK = np.asarray(trace.experts_TLK[rows[where : where + int(bounds[-1])]])
        all_valid = np.ones(len(chosen_TLK), dtype=bool)
        if all(  # one layer rules out most starts
            np.array_equal(
                count_token_slots(chosen_TLK[:, :some], all_valid, bounds, demand.num_experts),
                demand.counts_SLE[parts, :some],
            )
            for some in (1, trace.num_layers)
        ):
            return where
    return -1


def _mismatch_message(reason: str) -> str:
    return f"the demand was not counted from this trace ({reason}): pass the trace that was planned from, or none"
