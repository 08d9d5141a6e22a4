"""`RowLayout`: which tokens of a packed micro-batch each rank of a Megatron model sees, row by row; no torch.

Megatron packs the samples of a micro-batch end to end. Each is padded so that context parallelism can cut it, every
context-parallel rank takes two of its pieces, one from either end (`zigzag`), and under sequence parallelism every
tensor-parallel rank a run of what its context-parallel rank has. So the rows of one sample are on TP x CP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from jaxtyping import Int64, Integer, Shaped
from numpy import ndarray

from relibra.errors import ConfigError, TraceError


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How a trainer lays out packed samples.

    tensor_ranks    tensor-parallel ranks, with sequence parallelism; 1 without it: every rank then has all rows
    context_ranks   context-parallel ranks
    sample_multiple tokens of each sample are padded to a multiple of this
    total_multiple  rows of a context-parallel rank are padded, behind its last sample, to a multiple of this
    order           how context parallelism cuts: "zigzag", each sample in two pieces per rank; "contiguous", the whole
                    pack in one piece per rank
    """

    tensor_ranks: int = 1
    context_ranks: int = 1
    sample_multiple: int = 1
    total_multiple: int = 1
    order: Literal["zigzag", "contiguous"] = "zigzag"

    def __post_init__(self) -> None:
        """Raise ConfigError for a layout that cannot be cut into equal pieces."""
        sizes = (self.tensor_ranks, self.context_ranks, self.sample_multiple, self.total_multiple)
        if min(sizes) < 1:
            raise ConfigError(f"a row layout has sizes {sizes}: each must be at least 1")
        pieces = 2 * self.context_ranks if self.order == "zigzag" and self.context_ranks > 1 else 1
        if self.sample_multiple % pieces:
            raise ConfigError(
                f"zigzag over {self.context_ranks} context-parallel ranks cuts each sample into {pieces} pieces: "
                f"sample_multiple is {self.sample_multiple}, and must be a multiple of {pieces}"
            )

    @classmethod
    def of_verl(
        cls, *, tensor_ranks: int, context_ranks: int, order: Literal["zigzag", "contiguous"] = "zigzag"
    ) -> RowLayout:
        """Return the layout of verl 0.9 (`preprocess_thd_engine`), without FP8 or buckets of lengths."""
        pieces = 2 if order == "zigzag" and context_ranks > 1 else 1
        return cls(
            tensor_ranks=tensor_ranks,
            context_ranks=context_ranks,
            sample_multiple=tensor_ranks * context_ranks * pieces,
            order=order,
        )

    @classmethod
    def of_slime(cls, *, tensor_ranks: int, context_ranks: int, data_pad_size_multiplier: int = 128) -> RowLayout:
        """Return the layout of slime and miles (`prepare_routed_experts_for_routing_replay`), August 2026."""
        return cls(
            tensor_ranks=tensor_ranks,
            context_ranks=context_ranks,
            sample_multiple=2 * context_ranks if context_ranks > 1 else 1,
            total_multiple=tensor_ranks * data_pad_size_multiplier,
        )

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that share a sample, `X`: rank x is tensor rank x % TP, context rank x // TP."""
        return self.tensor_ranks * self.context_ranks

    def expert_rank(self, rank: int, *, data_rank: int, expert_ranks: int) -> tuple[int, int]:
        """Return the number of a rank's expert-parallel group, and its place there; without expert tensor parallelism.

        rank        of those that share a sample, 0 to X - 1
        data_rank   data-parallel rank
        """
        return divmod(rank + self.num_ranks * data_rank, expert_ranks)

    def rows(self, length_S: Sequence[int]) -> PackedRows:
        """Return the rows of every rank for a micro-batch whose samples have these numbers of tokens, in this order.

        raises    ConfigError when rows cannot be divided among the ranks
        """
        sample_n, position_n = self._pack(length_S)
        parts = self._cut_by_context(sample_n, position_n)
        rows = len(parts[0][0])
        if rows % self.tensor_ranks:
            raise ConfigError(
                f"{rows} rows cannot be divided among {self.tensor_ranks} tensor-parallel ranks: set sample_multiple "
                "or total_multiple to what the trainer pads to"
            )
        sample_XT, position_XT = (
            np.stack([part[which] for part in parts]).reshape(self.num_ranks, rows // self.tensor_ranks)
            for which in (0, 1)
        )
        return PackedRows(sample_XT=sample_XT, position_XT=position_XT)

    def _pack(self, length_S: Sequence[int]) -> tuple[ndarray, ndarray]:
        """Return sample and position of each row of the pack; for padding -1, and -1 - (place in the sample)."""
        tokens_S = np.asarray(length_S, dtype=np.int64)
        padded_S = -(-tokens_S // self.sample_multiple) * self.sample_multiple
        sample_n = np.repeat(np.arange(len(tokens_S)), padded_S)
        position_n = np.arange(len(sample_n)) - np.repeat(np.cumsum(padded_S) - padded_S, padded_S)
        is_padding_n = position_n >= tokens_S[sample_n]
        position_n = np.where(is_padding_n, -1 - position_n, position_n)  # zigzag needs the place of padding too
        return np.where(is_padding_n, -1, sample_n), position_n

    def _cut_by_context(self, sample_n: ndarray, position_n: ndarray) -> list[tuple[ndarray, ndarray]]:
        """Return the rows of each context-parallel rank."""
        ranks, n = self.context_ranks, len(sample_n)
        if ranks == 1:
            own = [np.arange(n)]
        elif self.order == "contiguous":
            if n % ranks:
                raise ConfigError(f"{n} rows cannot be cut into {ranks} equal pieces: set sample_multiple")
            own = np.split(np.arange(n), ranks)
        else:
            own = self._zigzag(position_n)
        padding = -(-len(own[0]) // self.total_multiple) * self.total_multiple - len(own[0])
        fill = np.full(padding, -1, dtype=np.int64)
        position_n = np.maximum(position_n, -1)
        return [(np.append(sample_n[rows], fill), np.append(position_n[rows], fill)) for rows in own]

    def _zigzag(self, position_n: ndarray) -> list[ndarray]:
        """Return the rows of each rank: of 2 CP pieces of a sample, pieces r and 2 CP - 1 - r, sample by sample."""
        place_n = np.where(position_n < 0, -1 - position_n, position_n)
        starts = np.append(np.flatnonzero(place_n == 0), len(place_n))
        own: list[list[ndarray]] = [[] for _ in range(self.context_ranks)]
        for start, stop in pairwise(starts):
            pieces = np.split(np.arange(start, stop), 2 * self.context_ranks)
            for rank, rows in enumerate(own):
                rows += [pieces[rank], pieces[-1 - rank]]
        return [np.concatenate([np.zeros(0, dtype=np.int64), *rows]) for rows in own]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Rows of a micro-batch on the ranks that share its samples.

    sample_XT     sample of each row, in the order of the pack; -1: padding
    position_XT   its token; -1: padding
    """

    sample_XT: Int64[ndarray, "X T"]
    position_XT: Int64[ndarray, "X T"]

    def routes(
        self, rank: int, routes: Sequence[Shaped[ndarray, "_ L K"]], *, num_experts: int
    ) -> Integer[ndarray, "T L K"]:
        """Return the experts of each row of a rank: those recorded, or K different ones in turn.

        Rows without a recorded route are padding and last tokens, whose outputs no loss reads: they take experts in
        turn, so that they load all experts evenly, and every process finds the same ones.

        rank     of those that share the samples, `tensor + TP context`
        routes   of each sample of the pack: one row per token, or without the last one; -1 in rows without a route
        raises   TraceError for routes of another shape, and ids out of range
        """
        sample_T, position_T = self.sample_XT[rank], self.position_XT[rank]
        shapes = {array.shape[1:] for array in routes}
        if len(shapes) != 1 or any(array.ndim != 3 for array in routes):
            raise TraceError(
                f"samples of a micro-batch have routes of shapes {sorted(shapes)}: expected [rows, layers, K]"
            )
        L, K = next(iter(shapes))
        if (samples := int(self.sample_XT.max(initial=-1)) + 1) > len(routes):
            raise TraceError(f"the pack has {samples} samples, and routes are given of {len(routes)}: give all of them")
        if num_experts < K:
            raise TraceError(f"{K} choices of {num_experts} experts cannot differ")
        turn_TK = ((np.arange(len(sample_T))[:, None] * K + np.arange(K)) % num_experts).astype(np.int32)
        ids_TLK = np.repeat(turn_TK[:, None], L, axis=1)
        for s, array in enumerate(routes):
            self._check(s, array, num_experts)
            own = np.flatnonzero((sample_T == s) & (position_T < len(array)))
            chosen = np.asarray(array[position_T[own]], dtype=np.int32)
            recorded = (chosen >= 0).all(axis=(1, 2))
            if ((chosen >= 0).any(axis=(1, 2)) != recorded).any():
                raise TraceError(f"sample {s} of the micro-batch has rows with a route in some layers only")
            ids_TLK[own[recorded]] = chosen[recorded]
        return ids_TLK

    def slices(self, rank: int) -> list[tuple[int, slice]]:
        """Return the runs of rows of a rank that are consecutive tokens of one sample: (sample or -1, rows)."""
        sample_T, position_T = self.sample_XT[rank], self.position_XT[rank]
        if not len(sample_T):
            return []
        follows_T = (sample_T[1:] == sample_T[:-1]) & ((sample_T[1:] < 0) | (np.diff(position_T) == 1))
        bounds = [0, *(np.flatnonzero(~follows_T) + 1).tolist(), len(sample_T)]
        return [(int(sample_T[start]), slice(start, stop)) for start, stop in pairwise(bounds)]

    def _check(self, s: int, array: Shaped[ndarray, "n L K"], num_experts: int) -> None:
        tokens = int(max((self.position_XT[self.sample_XT == s] + 1).max(initial=0), 0))
        if len(array) not in (tokens, tokens - 1):
            raise TraceError(
                f"sample {s} of the micro-batch has {len(array)} rows of routes for {tokens} tokens: expected one "
                "each, or all but the last"
            )
        if array.size and (int(array.max()) >= num_experts or int(array.min()) < -1):
            raise TraceError(
                f"sample {s} of the micro-batch has expert ids {array.min()} to {array.max()}: allowed are 0 to "
                f"{num_experts - 1}, and -1 in rows without a route"
            )
