"""Cut a recorded trace into micro-batches: a `ScheduledDemand`, for planning and comparing without a trainer.

*Recorded* order cuts every `tokens` rows of a task set; the sets alternate. Each part of a sample in a micro-batch is a
sample of the demand. *Shuffled* order assigns whole samples, like a trainer.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray
from numpy.random import Generator

from relibra.errors import TraceError
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots
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
    starts = []
    for turn in range(max((len(rows) // tokens for rows in sets), default=0)):
        starts += [rows[turn * tokens : (turn + 1) * tokens] for rows in sets if (turn + 1) * tokens <= len(rows)]
    if not starts:
        raise TraceError(f"{trace.num_rows} rows do not fill one micro-batch of {tokens} tokens: choose fewer")
    sample_T = np.repeat(np.arange(trace.num_samples), np.diff(trace.offsets))
    pieces, micro_batch_S = [], []
    for m, rows in enumerate(starts):
        edges = np.flatnonzero((np.diff(sample_T[rows]) != 0) | (np.diff(rows) != 1)) + 1
        for piece in np.split(rows, edges):
            pieces.append((piece[0], piece[-1] + 1))
            micro_batch_S.append(m)
    counts_SLE = np.concatenate(
        [
            count_token_slots(trace.experts_TLK, trace.valid_T, np.array([start, stop]), trace.num_experts)
            for start, stop in pieces
        ]
    )
    first_S = np.array([start for start, _ in pieces])
    return _scheduled(trace, counts_SLE, trace.sample_ids[sample_T[first_S]], np.array(micro_batch_S), num_ranks)


def deal_samples(trace: RoutingTrace, tokens: int, num_ranks: int, rng: Generator) -> ScheduledDemand:
    """Assign whole samples in random order to micro-batches of at most `tokens` rows; a longer sample has its own.

    Inside a micro-batch samples go to source ranks longest first, each to the rank with the fewest rows so far.
    """
    if tokens < 1:
        raise TraceError(f"micro-batches of {tokens} tokens: at least 1 token each")
    counts_SLE = count_token_slots(trace.experts_TLK, trace.valid_T, trace.offsets, trace.num_experts)
    rows_S = np.diff(trace.offsets)
    micro_batch_S = np.full(trace.num_samples, -1)
    m, filled = 0, 0
    for s in rng.permutation(trace.num_samples):
        if filled and filled + rows_S[s] > tokens:
            m, filled = m + 1, 0
        micro_batch_S[s] = m
        filled += rows_S[s]
    return _scheduled(trace, counts_SLE, trace.sample_ids, micro_batch_S, num_ranks)


def select_micro_batches(demand: ScheduledDemand, first: int) -> ScheduledDemand:
    """Return the micro-batches from `first` on, renumbered from 0, with their samples only."""
    kept = np.flatnonzero(demand.micro_batch_S >= first)
    part = Demand(
        counts_SLE=demand.counts_SLE[kept],
        layer_ids=demand.layer_ids,
        sample_ids=demand.sample_ids[kept],
        pairs_LEE=demand.pairs_LEE,
        top_k=demand.top_k,
    )
    M, _, R, _ = demand.tokens_MLRE.shape
    return part.with_schedule(demand.micro_batch_S[kept] - first, demand.rank_S[kept], R, M - first)


def task_sets(trace: RoutingTrace, tokens: int) -> list[Int64[ndarray, " T"]]:
    """Return the rows of each task set, in recorded order: the named groups, if each fills a micro-batch, else all."""
    rows_S, group_S = np.diff(trace.offsets), np.asarray(trace.group_ids)
    group_T = np.repeat(group_S, rows_S)
    named = range(len(trace.group_names))
    by_group = [np.flatnonzero(group_T == g) for g in named]
    if by_group and all(len(rows) >= tokens for rows in by_group) and (group_S >= 0).all():
        return by_group
    return [np.arange(trace.num_rows)]


def _scheduled(
    trace: RoutingTrace, counts_SLE: ndarray, sample_ids: ndarray, micro_batch_S: ndarray, num_ranks: int
) -> ScheduledDemand:
    slots_S = counts_SLE[:, 0].sum(axis=1)
    filled_MR = np.zeros((int(micro_batch_S.max(initial=-1)) + 1, num_ranks), dtype=np.int64)
    rank_S = np.zeros(len(slots_S), dtype=np.int32)
    for s in np.argsort(-slots_S, kind="stable"):
        rank_S[s] = np.argmin(filled_MR[micro_batch_S[s]])
        filled_MR[micro_batch_S[s], rank_S[s]] += slots_S[s]
    demand = Demand(
        counts_SLE=counts_SLE.astype(np.int32),
        layer_ids=trace.layer_ids,
        sample_ids=np.asarray(sample_ids),
        pairs_LEE=co_activation(trace),
        top_k=trace.top_k,
    )
    return demand.with_schedule(micro_batch_S.astype(np.int32), rank_S, num_ranks)
