"""`sample_of_rows`: the rows of a trace that a demand was counted from, whole samples or pieces of them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.demand import Demand, count_token_slots
from relibra.routing.trace import RoutingTrace


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
        first = _find_start(trace, demand, rows, parts, lengths)
        if first < 0:
            raise TraceError(_mismatch_message(f"sample {sample} has other counts"))
        result_T[rows[first : first + int(lengths.sum())]] = np.repeat(parts, lengths)
    return result_T


def _find_start(trace: RoutingTrace, demand: Demand, rows: ndarray, parts: list[int], lengths: ndarray) -> int:
    """Return where in `rows` the parts have their counts: at 0, the last place, or the first other one; -1: nowhere."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    last = len(rows) - int(bounds[-1])
    for first in dict.fromkeys([0, last, *range(last)]) if last >= 0 else ():
        chosen_TLK = np.asarray(trace.experts_TLK[rows[first : first + int(bounds[-1])]])
        all_valid = np.ones(len(chosen_TLK), dtype=bool)
        if all(  # one layer rules out most starts
            np.array_equal(
                count_token_slots(chosen_TLK[:, :some], all_valid, bounds, demand.num_experts),
                demand.counts_SLE[parts, :some],
            )
            for some in (1, trace.num_layers)
        ):
            return first
    return -1


def _mismatch_message(reason: str) -> str:
    return f"the demand was not counted from this trace ({reason}): pass the trace that was planned from, or none"
