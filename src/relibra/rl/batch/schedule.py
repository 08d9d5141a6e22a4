"""`Schedule`: which response is trained in which mini-batch and micro-batch, and on which rank; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, Int64
from numpy import ndarray

_MINI_BATCH_STREAM = 5
"""Random stream that assigns responses to mini-batches."""


class SharedPrompts(NamedTuple):
    """Prompts of responses.

    group_S    responses with an equal number may share theirs
    tokens_S   of the prompt of each
    """

    group_S: Int64[ndarray, " S"]
    tokens_S: Int64[ndarray, " S"]

    def of(self, chosen: Int64[ndarray, " X"]) -> SharedPrompts:
        """Return those of some responses."""
        return SharedPrompts(self.group_S[chosen], self.tokens_S[chosen])


def prompts_of(
    group_id_S: Int[ndarray, " S"], version_S: Int[ndarray, " S"], prompt_S: Int[ndarray, " S"]
) -> SharedPrompts:
    """Return the prompts that responses may share: within a group, those with routes of one version of the weights.

    prompt_S   tokens of each prompt
    """
    _, group_S = np.unique(np.stack([group_id_S, version_S], axis=1), axis=0, return_inverse=True)
    return SharedPrompts(group_S.astype(np.int64), np.asarray(prompt_S, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Micro-batches of a step, in the order they run; every rank runs each, with or without a response.

    mini_batch_M    mini-batch of each micro-batch: ascending, none of them empty
    micro_batch_S   of each response
    rank_S          of each response
    piece_S         responses with an equal number are trained together, behind one prompt; None: each by itself
    """

    mini_batch_M: Int32[ndarray, " M"]
    micro_batch_S: Int32[ndarray, " S"]
    rank_S: Int32[ndarray, " S"]
    piece_S: Int64[ndarray, " S"] | None = None

    @property
    def leads_S(self) -> Bool[ndarray, " S"]:
        """Return whether each response is the first of its piece, whose prompt is fed."""
        leads_S = np.ones(len(self.rank_S), dtype=bool)
        if self.piece_S is not None:
            leads_S[:] = False
            leads_S[np.unique(self.piece_S, return_index=True)[1]] = True
        return leads_S

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
    prompts: SharedPrompts | None = None,
) -> Schedule:
    """Assign responses to mini-batches by unit, and inside each to as few micro-batches as their tokens allow.

    A mini-batch takes whole units in ascending order, as evenly as possible, whatever the number of ranks. Ranks wait
    for each other in every layer, so those of a micro-batch get similar work:

    - A response longer than the limit is alone on its rank; the longest such ones share micro-batches, one on each
      rank. Ranks that are left over in the last of these are filled up to the limit.
    - The others go to the (micro-batch, rank) with fewest tokens, longest first.
    - Ranks with most attention (sum of squared lengths) share a micro-batch.
    - Responses that share a prompt are cut into pieces, each with the prompt once. Large pieces save tokens, small ones
      fit together: taken is the size with the fewest tokens of fullest ranks, summed over micro-batches.

    tokens_S             of each response
    unit_S               position of the response's unit in the order in which units fill mini-batches
                         (`draw_unit_order`); a unit, a group or one response, stays together in a mini-batch
    mini_batches         at most; fewer where there are fewer units
    micro_batch_tokens   limit of one rank in one micro-batch
    prompts              that responses share; None: each feeds its own

    >>> tokens_S = np.array([5, 3, 4, 4])
    >>> schedule = make_schedule(tokens_S, np.arange(4), mini_batches=2, micro_batch_tokens=8, num_ranks=1)
    >>> schedule.mini_batch_M.tolist(), schedule.micro_batch_S.tolist()
    ([0, 1], [0, 0, 1, 1])
    """
    micro_batch_S, rank_S = np.full((2, len(tokens_S)), -1, dtype=np.int32)
    mini_batch_M: list[int] = []
    piece_S = np.arange(len(tokens_S), dtype=np.int64)
    units = np.unique(unit_S)
    parts = [part for part in np.array_split(units, mini_batches) if len(part)]
    for number, part in enumerate(parts):
        chosen = np.flatnonzero(np.isin(unit_S, part))
        if prompts is None:
            bin_X = _fill(tokens_S[chosen], micro_batch_tokens, num_ranks)
        else:
            bin_X, lead_X = _fill_pieces(tokens_S[chosen], prompts.of(chosen), micro_batch_tokens, num_ranks)
            piece_S[chosen] = chosen[lead_X]
        micro_batch_S[chosen] = len(mini_batch_M) + bin_X // num_ranks
        rank_S[chosen] = bin_X % num_ranks
        mini_batch_M += [number] * (int(bin_X.max()) // num_ranks + 1)
    return Schedule(
        mini_batch_M=np.array(mini_batch_M, dtype=np.int32), micro_batch_S=micro_batch_S, rank_S=rank_S, piece_S=piece_S
    )


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


_PIECES = (1, 2, 3, 4, 6, 8)
"""The token limit divided by each of these is a size of pieces to try."""


def _fill_pieces(
    tokens_X: Int[ndarray, " X"], prompts: SharedPrompts, limit: int, num_ranks: int
) -> tuple[Int64[ndarray, " X"], Int64[ndarray, " X"]]:
    """Return a bin for each response, as `_fill` does, and the first response of its piece."""
    best: tuple[int, Any, Any] | None = None
    for size in dict.fromkeys([*(max(1, limit // parts) for parts in _PIECES), 1]):
        lead_X = _cut_into_pieces(tokens_X, prompts, size)
        piece_X = np.unique(lead_X, return_inverse=True)[1]
        fed_X = np.where(lead_X == np.arange(len(lead_X)), tokens_X, tokens_X - prompts.tokens_S)
        tokens_P = np.bincount(piece_X, fed_X).astype(np.int64)
        squares_P = np.bincount(piece_X, tokens_X.astype(np.float64) ** 2 - (tokens_X - fed_X).astype(np.float64) ** 2)
        bin_P = _fill(tokens_P, limit, num_ranks, squares_P)
        tokens_MR = np.bincount(bin_P, tokens_P, (int(bin_P.max()) // num_ranks + 1) * num_ranks).reshape(-1, num_ranks)
        fullest = int(tokens_MR.max(axis=1).sum())
        if best is None or fullest < best[0]:
            best = fullest, bin_P[piece_X], lead_X
    assert best is not None, "sizes are tried"
    return best[1:]


def _cut_into_pieces(tokens_X: Int[ndarray, " X"], prompts: SharedPrompts, limit: int) -> Int64[ndarray, " X"]:
    """Return for each response the first of its piece: as few pieces as a limit of tokens allows, of similar size."""
    lead_X = np.empty(len(tokens_X), dtype=np.int64)
    order = np.argsort(prompts.group_S, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(prompts.group_S[order])) + 1):
        prompt = prompts.tokens_S[members]
        piece_x = _fill(tokens_X[members] - prompt, max(1, limit - int(prompt[0])), 1)
        _, first, number_x = np.unique(piece_x, return_index=True, return_inverse=True)
        lead_X[members] = members[first][number_x]
    return lead_X


def _fill(
    tokens_X: Int[ndarray, " X"], limit: int, num_ranks: int, squares_X: Float64[ndarray, " X"] | None = None
) -> Int64[ndarray, " X"]:
    """Return a bin for each response or piece: number of its micro-batch x ranks + rank.

    squares_X   attention of each; None: squared tokens
    """
    bin_X = np.full(len(tokens_X), -1, dtype=np.int64)
    order = np.argsort(-tokens_X, kind="stable")
    long = order[tokens_X[order] > limit]
    bin_X[long] = np.arange(len(long))
    rest = order[len(long) :]
    left_over = -len(long) % num_ranks
    if left_over:
        filled_X = _fill_to_the_limit(tokens_X[rest], limit, left_over)
        bin_X[rest] = np.where(filled_X < 0, -1, len(long) + filled_X)
        rest = rest[filled_X < 0]
    if len(rest):
        bin_X[rest] = len(long) + left_over + _fill_evenly(tokens_X[rest], limit, num_ranks)
    return _sort_bins(bin_X, tokens_X.astype(np.float64) ** 2 if squares_X is None else squares_X)


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


def _sort_bins(bin_X: Int64[ndarray, " X"], squares_X: Float64[ndarray, " X"]) -> Int64[ndarray, " X"]:
    """Return bins numbered by falling attention, so that ranks of a micro-batch are alike; empty bins come last.

    The sum over micro-batches of the rank with most attention is then least.
    """
    attention = np.bincount(bin_X, squares_X)
    place = np.empty(len(attention), dtype=np.int64)
    place[np.argsort(-attention, kind="stable")] = np.arange(len(attention))
    return place[bin_X]


def cut_into_runs(sizes: Sequence[int], limit: int, shared: Sequence[int] | None = None) -> list[list[int]]:
    """Return the places of consecutive sizes in runs whose sums are within a limit; a larger one is alone.

    shared   part of each size that counts only for the first of a run; None: 0

    >>> cut_into_runs([3, 4, 2, 9], 8)
    [[0, 1], [2], [3]]
    """
    runs: list[list[int]] = []
    filled = 0
    for place, size in enumerate(sizes):
        added = size - shared[place] if shared is not None else size
        if not runs or filled + added > limit:
            runs.append([])
            filled, added = 0, size
        runs[-1].append(place)
        filled += added
    return runs
