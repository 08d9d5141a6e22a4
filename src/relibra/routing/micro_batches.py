"""Micro-batches of a recorded trace: a `ScheduledDemand`, for planning and comparing without a trainer.

`schedule_samples` gives whole samples to ranks, like a trainer, and leaves none out. Micro-batches of
different task sets (`task_sets`) alternate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from jaxtyping import Int64
from numpy import ndarray
from numpy.random import Generator

from relibra.errors import TraceError
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.statistics import co_activation
from relibra.routing.trace import RoutingTrace


def schedule_samples(
    trace: RoutingTrace, rank_tokens: int, num_ranks: int, rng: Generator | None = None
) -> ScheduledDemand:
    """Give whole samples to micro-batches and ranks, at most `rank_tokens` tokens each; no sample is left out.

    Each task set (`task_sets`) is divided into few micro-batches of about equal tokens; the sets
    alternate. Inside a micro-batch samples go to ranks longest first, each to the one with fewest tokens. A sample
    longer than the limit is alone on its rank. Tokens are rows with a route, so the last token is not counted.

    rng       shuffles the samples first, as one task set; None: recorded order
    raises    TraceError for a limit below 1, or a trace without samples
    """
    if rank_tokens < 1:
        raise TraceError(f"micro-batches of {rank_tokens} tokens per rank: at least 1 token each")
    if not trace.num_samples:
        raise TraceError("the trace has no samples: there is no step to plan")
    demand = replace(Demand.from_trace(trace), pairs_LEE=co_activation(trace))
    sets = task_sets(trace, rank_tokens * num_ranks)
    sample_T = np.repeat(np.arange(trace.num_samples), np.diff(trace.offsets))
    orders = [np.unique(sample_T[rows]) for rows in sets]
    if len(sets) == 1:
        orders = [np.arange(trace.num_samples)]  # samples without rows too
    if rng is not None:
        orders = [rng.permutation(trace.num_samples)]
    rank_S = np.zeros(trace.num_samples, dtype=np.int32)
    turn_S = np.zeros((trace.num_samples, 2), dtype=np.int64)
    for number, samples in enumerate(orders):
        turn_X, rank_S[samples] = _divide(demand.length_S[samples].tolist(), rank_tokens, num_ranks)
        turn_S[samples] = np.stack([turn_X, np.full(len(samples), number)], axis=1)
    micro_batch_S = np.unique(turn_S, axis=0, return_inverse=True)[1].ravel()  # sets alternate: by turn, then by set
    return demand.with_schedule(micro_batch_S, rank_S, num_ranks)


def _divide(
    length_X: Sequence[int], rank_tokens: int, num_ranks: int
) -> tuple[Int64[ndarray, " X"], Int64[ndarray, " X"]]:
    """Return micro-batch and rank of each sample: few, about equal micro-batches of consecutive samples that fit."""
    taken_X = np.minimum(length_X, rank_tokens)  # a longer sample takes one rank, no more
    total = int(taken_X.sum())
    number = max(1, -(-total // (rank_tokens * num_ranks)))
    middle_X = np.cumsum(taken_X) - taken_X / 2
    while True:
        micro_batch_X = np.minimum(number - 1, middle_X * number // max(1, total)).astype(np.int64)
        rank_X = np.zeros(len(length_X), dtype=np.int64)
        starts = np.searchsorted(micro_batch_X, np.arange(number + 1))
        for start, stop in pairwise(starts.tolist()):
            if not fill_ranks(length_X[start:stop], rank_tokens, num_ranks, rank_X[start:stop]):
                break
        else:
            return micro_batch_X, rank_X
        number = max(number + 1, number * 51 // 50)


def fill_ranks(length_X: Sequence[int], rank_tokens: int, num_ranks: int, rank_X: Int64[ndarray, " X"]) -> bool:
    """Give samples to ranks, longest first, each to the rank with fewest tokens; return whether all limits hold."""
    filled = [(0, rank) for rank in range(num_ranks)]
    for x in sorted(range(len(length_X)), key=lambda x: (-length_X[x], x)):
        tokens, rank = filled[0]
        if tokens and length_X[x] and tokens + length_X[x] > rank_tokens:
            return False
        rank_X[x] = rank
        heapq.heapreplace(filled, (tokens + length_X[x], rank))
    return True


def draw_samples(trace: RoutingTrace, rows: int, rng: Generator) -> RoutingTrace:
    """Draw samples with replacement, as many as fit into `rows` rows.

    returns   at least one sample; ids are numbered anew
    raises    TraceError for a trace without rows
    """
    rows_S = np.diff(trace.offsets)
    if not rows_S.any():
        raise TraceError("the trace has no rows: there are no samples to draw again")
    drawn = rng.integers(trace.num_samples, size=int(1.5 * rows / rows_S.mean()) + 100)
    drawn = drawn[: max(1, int(np.searchsorted(np.cumsum(rows_S[drawn]), rows, side="right")))]
    again = trace.select(drawn.tolist())
    return replace(again, sample_ids=np.arange(len(drawn)))


def select_micro_batches(demand: ScheduledDemand, first: int) -> ScheduledDemand:
    """Return the micro-batches from `first` on, renumbered from 0, with their samples only."""
    later = demand.of_micro_batches(slice(first, len(demand.tokens_MLRE)))
    kept = later.micro_batch_S >= 0
    return replace(
        later,
        counts_SLE=later.counts_SLE[kept],
        sample_ids=later.sample_ids[kept],
        attended_S=None if later.attended_S is None else later.attended_S[kept],
        piece_S=None if later.piece_S is None else (np.cumsum(kept) - 1)[later.piece_S[kept]],
        micro_batch_S=later.micro_batch_S[kept],
        rank_S=later.rank_S[kept],
        group_M=None if later.group_M is None else later.group_M - later.group_M[:1],
    )


def task_sets(trace: RoutingTrace, tokens: int) -> list[Int64[ndarray, " T"]]:
    """Return rows of each task set: named groups if each fills a micro-batch and they hold all rows, else one set."""
    group_T = np.repeat(trace.group_ids, trace.rows_per_sample)
    by_group = [np.flatnonzero(group_T == g) for g in range(len(trace.group_names))]
    if by_group and all(len(rows) >= tokens for rows in by_group) and (trace.group_ids >= 0).all():
        return by_group
    return [np.arange(trace.num_rows)]
