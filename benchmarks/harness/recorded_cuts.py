"""`cut_recorded`: micro-batches of exactly as many rows, for measurements; a part of a sample counts as a sample."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from relibra.errors import TraceError
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots
from relibra.routing.micro_batches import fill_ranks, task_sets
from relibra.routing.statistics import co_activation
from relibra.routing.trace import RoutingTrace


def cut_recorded(trace: RoutingTrace, tokens: int, num_ranks: int) -> ScheduledDemand:
    """Return micro-batches of exactly `tokens` rows in recorded order; incomplete ones are left out.

    Task sets are the named groups of the trace, which alternate, or the whole trace if one cannot fill a micro-batch.
    Inside a micro-batch, pieces of samples go to source ranks so that these hold about the same number of rows.

    returns   demand whose samples are pieces; `sample_ids` repeat where a sample was cut
    raises    TraceError when no micro-batch is full
    """
    if tokens < 1:
        raise TraceError(f"micro-batches of {tokens} tokens: at least 1 token each")
    sets = task_sets(trace, tokens)
    rows_of = []
    for turn in range(max((len(rows) // tokens for rows in sets), default=0)):
        rows_of += [rows[turn * tokens : (turn + 1) * tokens] for rows in sets if (turn + 1) * tokens <= len(rows)]
    if not rows_of:
        raise TraceError(f"{trace.num_rows} rows do not fill one micro-batch of {tokens} tokens: choose fewer")
    sample_T = np.repeat(np.arange(trace.num_samples), np.diff(trace.offsets))
    bounds, micro_batch_S = [], np.zeros(0, dtype=np.int32)
    for m, rows in enumerate(rows_of):
        edges = np.flatnonzero((np.diff(sample_T[rows]) != 0) | (np.diff(rows) != 1)) + 1
        pieces = np.split(rows, edges)
        bounds += [np.array([piece[0], piece[-1] + 1]) for piece in pieces]
        micro_batch_S = np.append(micro_batch_S, np.full(len(pieces), m, dtype=np.int32))
    counts = [count_token_slots(trace.experts_TLK, trace.valid_T, some, trace.num_experts) for some in bounds]
    counts_SLE = np.concatenate(counts).astype(np.int32)
    token_slots_S, rank_S = counts_SLE[:, 0].sum(axis=1), np.zeros(len(bounds), dtype=np.int64)
    for start, stop in pairwise(np.searchsorted(micro_batch_S, np.arange(len(rows_of) + 1)).tolist()):
        fill_ranks(token_slots_S[start:stop].tolist(), trace.num_rows * trace.top_k, num_ranks, rank_S[start:stop])
    demand = Demand(
        counts_SLE=counts_SLE,
        layer_ids=trace.layer_ids,
        sample_ids=trace.sample_ids[sample_T[[start for start, _ in bounds]]],
        pairs_LEE=co_activation(trace),
        top_k=trace.top_k,
    )
    return demand.with_schedule(micro_batch_S, rank_S, num_ranks)
