"""`Schedule`: which response is trained in which mini-batch and micro-batch, and on which rank; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32, Int64
from numpy import ndarray

_MINI_BATCH_STREAM = 5
"""Random stream that assigns responses to mini-batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Micro-batches of a step, in the order they run; every rank runs each, with or without a response.

    mini_batch_M    mini-batch of each micro-batch: ascending, none of them empty
    micro_batch_S   of each response
    rank_S          of each response
    """

    mini_batch_M: Int32[ndarray, " M"]
    micro_batch_S: Int32[ndarray, " S"]
    rank_S: Int32[ndarray, " S"]

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of the step, M."""
        return len(self.mini_batch_M)


def make_schedule(
    tokens_S: Int[ndarray, " S"],
    unit_S: Int[ndarray, " S"],
    *,
    mini_batches: int,
    micro_batch_tokens: int,
    num_ranks: int,
) -> Schedule:
    """Assign responses to mini-batches by unit, and inside each to as few micro-batches as their tokens allow.

    A mini-batch takes whole units in ascending order, as evenly as possible, whatever the number of ranks. Ranks wait
    for each other in every layer, so those of a micro-batch get similar work:

    - A response longer than the limit is alone on its rank; the longest such ones share micro-batches, one on each
      rank. Ranks that are left over in the last of these are filled up to the limit.
    - The others go to the (micro-batch, rank) with fewest tokens, longest first.
    - Ranks with most attention (sum of squared lengths) share a micro-batch.

    tokens_S             of each response
    unit_S               unit that stays together in a mini-batch, a group or the response itself: its position in
                         the order that mini-batches are filled in (`draw_unit_order`)
    mini_batches         at most; fewer where there are fewer units
    micro_batch_tokens   limit of one rank in one micro-batch

    >>> tokens_S = np.array([5, 3, 4, 4])
    >>> schedule = make_schedule(tokens_S, np.arange(4), mini_batches=2, micro_batch_tokens=8, num_ranks=1)
    >>> schedule.mini_batch_M.tolist(), schedule.micro_batch_S.tolist()
    ([0, 1], [0, 0, 1, 1])
    """
    micro_batch_S, rank_S = np.full((2, len(tokens_S)), -1, dtype=np.int32)
    mini_batch_M: list[int] = []
    units = np.unique(unit_S)
    parts = [part for part in np.array_split(units, mini_batches) if len(part)]
    for number, part in enumerate(parts):
        chosen = np.flatnonzero(np.isin(unit_S, part))
        bin_X = _fill(tokens_S[chosen], micro_batch_tokens, num_ranks)
        micro_batch_S[chosen] = len(mini_batch_M) + bin_X // num_ranks
        rank_S[chosen] = bin_X % num_ranks
        mini_batch_M += [number] * (int(bin_X.max()) // num_ranks + 1)
    return Schedule(mini_batch_M=np.array(mini_batch_M, dtype=np.int32), micro_batch_S=micro_batch_S, rank_S=rank_S)


def draw_unit_order(
    sample_id_S: Int[ndarray, " S"], group_id_S: Int[ndarray, " S"], *, by_group: bool, seed: int
) -> Int64[ndarray, " S"]:
    """Draw the order in which groups, or single responses, fill mini-batches; return its position for each response.

    by_group   keep groups together in a mini-batch
    """
    units, unit_S = np.unique(group_id_S if by_group else sample_id_S, return_inverse=True)
    newest = int(sample_id_S.max(initial=0))  # differs from step to step, with few exceptions
    order_X = np.random.default_rng([seed, _MINI_BATCH_STREAM, newest]).permutation(len(units))
    return order_X[unit_S]


def _fill(tokens_X: Int[ndarray, " X"], limit: int, num_ranks: int) -> Int64[ndarray, " X"]:
    """Return a bin for each response: number of its micro-batch x ranks + rank."""
    bin_X = np.full(len(tokens_X), -1, dtype=np.int64)
    order = np.argsort(-tokens_X, kind="stable")
    long = order[tokens_X[order] > limit]
    bin_X[long] = np.arange(len(long))
    rest = order[len(long) :]
    beside = -len(long) % num_ranks
    if beside:
        filled_X = _fill_to_the_limit(tokens_X[rest], limit, beside)
        bin_X[rest] = np.where(filled_X < 0, -1, len(long) + filled_X)
        rest = rest[filled_X < 0]
    if len(rest):
        bin_X[rest] = len(long) + beside + _fill_evenly(tokens_X[rest], limit, num_ranks)
    return _sort_bins(bin_X, tokens_X)


def _fill_to_the_limit(tokens_X: Int[ndarray, " X"], limit: int, bins: int) -> Int64[ndarray, " X"]:
    """Return the bin of each response: the emptiest one when its turn comes, -1 where it does not fit.

    tokens_X   in the order in which responses get a bin, longest first
    """
    bin_X, tokens_of_bin = np.full(len(tokens_X), -1, dtype=np.int64), np.zeros(bins, dtype=np.int64)
    for x, tokens in enumerate(tokens_X):
        chosen = int(np.argmin(tokens_of_bin))
        if tokens_of_bin[chosen] + tokens <= limit:
            bin_X[x] = chosen
            tokens_of_bin[chosen] += tokens
    return bin_X


def _fill_evenly(tokens_X: Int[ndarray, " X"], limit: int, num_ranks: int) -> Int64[ndarray, " X"]:
    """Return bins as `_fill_to_the_limit` does, in as few micro-batches as all responses fit into."""
    micro_batches = max(1, -(-int(tokens_X.sum()) // (limit * num_ranks)))
    while True:
        bin_X = _fill_to_the_limit(tokens_X, limit, micro_batches * num_ranks)
        if (bin_X >= 0).all():
            return bin_X
        micro_batches += 1


def _sort_bins(bin_X: Int64[ndarray, " X"], tokens_X: Int[ndarray, " X"]) -> Int64[ndarray, " X"]:
    """Return bins numbered by falling attention, so that ranks of a micro-batch are alike; empty bins come last.

    The sum over micro-batches of the rank with most attention is then least.
    """
    attention = np.bincount(bin_X, tokens_X.astype(np.float64) ** 2)
    place = np.empty(len(attention), dtype=np.int64)
    place[np.argsort(-attention, kind="stable")] = np.arange(len(attention))
    return place[bin_X]


def cut_into_runs(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the places of consecutive sizes in runs whose sums are within a limit; a larger one is alone.

    >>> cut_into_runs([3, 4, 2, 9], 8)
    [[0, 1], [2], [3]]
    """
    runs: list[list[int]] = []
    filled = 0
    for place, size in enumerate(sizes):
        if not runs or filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(place)
        filled += size
    return runs
