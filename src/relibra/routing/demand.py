"""`Demand`: token-slots per expert, counted from recorded routes; `ScheduledDemand`: the same under a schedule.

A token-slot is one (token, expert) assignment: a token that picks K experts makes K of them in every layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64, Shaped
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import check_array_size, check_model_size
from relibra.routing.compiled import compiled
from relibra.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """Token-slots per sample, layer and expert.

    counts_SLE   token-slots of sample S at expert E of layer L; valid rows only
    layer_ids    absolute decoder layer of each entry of the layer axis
    sample_ids   id of each sample
    pairs_LEE    tokens of all samples that pick two experts together (`statistics.co_activation`), for send-once
                 volumes; None: not counted
    top_k        K, choices per token; None: not known
    attended_S   attention of each sample in squared tokens, for samples that also see tokens of others (a prompt that
                 several responses share); None: the square of its own tokens
    piece_S      per sample, position of the first of those that share its prompt and stay together; None: all are free
    """

    counts_SLE: Int32[ndarray, "S L E"]
    layer_ids: Int[ndarray, " L"]
    sample_ids: Int[ndarray, " S"]
    pairs_LEE: Int64[ndarray, "L E E"] | None = None
    top_k: int | None = None
    attended_S: Int64[ndarray, " S"] | None = None
    piece_S: Int64[ndarray, " S"] | None = None

    @staticmethod
    def from_trace(trace: RoutingTrace) -> Demand:
        """Return the token-slots of a trace per sample; `pairs_LEE` is left None.

        raises    TraceError when a valid row holds an id out of range, or counts would take far more than the routes
        """
        S, L, E = trace.num_samples, trace.num_layers, trace.num_experts
        check_array_size("counts of token-slots", 4, trace.experts_TLK.nbytes, samples=S, layers=L, experts=E)
        counts_SLE = np.zeros((S, L, E), dtype=np.int32)
        _add_token_slots(trace.experts_TLK, trace.valid_T, trace.offsets, counts_SLE)
        return Demand(counts_SLE=counts_SLE, layer_ids=trace.layer_ids, sample_ids=trace.sample_ids, top_k=trace.top_k)

    @staticmethod
    def from_traces(traces: Iterable[RoutingTrace]) -> Demand:
        """Return the demand of pieces of a trace, read one at a time; raises TraceError for none, or several models."""
        pieces = [Demand.from_trace(trace) for trace in traces]
        if not pieces:
            raise TraceError("no routes to count: the trace has no pieces")
        models = {(piece.num_experts, *piece.layer_ids.tolist()) for piece in pieces}
        if len(models) > 1:
            raise TraceError(f"pieces come from different models: (experts, layers ...) {models}")
        return replace(
            pieces[0],
            counts_SLE=np.concatenate([piece.counts_SLE for piece in pieces]),
            sample_ids=np.concatenate([piece.sample_ids for piece in pieces]),
        )

    @property
    def num_experts(self) -> int:
        """Return the logical experts per layer, `E`."""
        return self.counts_SLE.shape[2]

    @cached_property
    def length_S(self) -> Int64[ndarray, " S"]:
        """Return the tokens of each sample: token-slots of one layer / `top_k`; without it, token-slots. Read-only."""
        length_S: ndarray = self.counts_SLE[:, :1].sum(axis=(1, 2), dtype=np.int64) // (self.top_k or 1)
        length_S.flags.writeable = False  # the array is shared by all callers
        return length_S

    @property
    def attention_S(self) -> Int64[ndarray, " S"]:
        """Return the attention of each sample, in squared tokens."""
        return self.length_S**2 if self.attended_S is None else self.attended_S

    def with_schedule(
        self,
        micro_batch_S: Int[ndarray, " S"],
        rank_S: Int[ndarray, " S"],
        num_ranks: int,
        num_micro_batches: int | None = None,
    ) -> ScheduledDemand:
        """Return the same demand, split by the micro-batch and the source rank of each sample.

        micro_batch_S   micro-batch of each sample, 0-based, or -1: the sample is left out
        rank_S          source rank of each sample, in 0..num_ranks-1
        num_micro_batches   number of micro-batches, empty last ones included; None: the highest in the schedule + 1.
                        Where the number does not change, `group_M` stays
        raises          TraceError when the schedule does not fit, or a micro-batch has 2^31 token-slots for one expert
        """
        S, L, E = self.counts_SLE.shape
        if micro_batch_S.shape != (S,) or rank_S.shape != (S,):
            raise TraceError(f"schedule of {len(micro_batch_S)} samples for a demand of {S} samples: pass all of them")
        kept = np.flatnonzero(micro_batch_S >= 0)
        if len(kept) and (rank_S[kept].min() < 0 or rank_S[kept].max() >= num_ranks):
            raise TraceError(
                f"the schedule names ranks {rank_S[kept].min()}..{rank_S[kept].max()}: allowed are 0..{num_ranks - 1}"
            )
        named = int(micro_batch_S.max(initial=-1)) + 1
        num_micro_batches = named if num_micro_batches is None else num_micro_batches
        if named > num_micro_batches:
            raise TraceError(f"the schedule names micro-batch {named - 1}: there are {num_micro_batches}")
        may_overflow = len(kept) * int(self.counts_SLE.max(initial=0)) >= 1 << 31  # counts are 32-bit
        for m in np.unique(micro_batch_S[kept]) if may_overflow else ():
            if int(self.counts_SLE[micro_batch_S == m].sum(axis=0, dtype=np.int64).max()) >= 1 << 31:
                raise TraceError(f"micro-batch {m} has 2^31 token-slots or more for one expert: cut smaller ones")
        axes = {"micro_batches": num_micro_batches, "layers": L, "ranks": num_ranks, "experts": E}
        check_array_size("token-slots of ranks", 4, self.counts_SLE.nbytes, **axes)
        tokens_MLRE = np.zeros(tuple(axes.values()), dtype=np.int32)
        for s in kept:
            tokens_MLRE[micro_batch_S[s], :, rank_S[s]] += self.counts_SLE[s]
        group_M: ndarray | None = getattr(self, "group_M", None)
        return ScheduledDemand(
            **{field.name: getattr(self, field.name) for field in fields(Demand)},
            group_M=group_M if group_M is not None and len(group_M) == num_micro_batches else None,
            tokens_MLRE=tokens_MLRE,
            micro_batch_S=micro_batch_S.astype(np.int32),
            rank_S=rank_S.astype(np.int32),
        )

    def digest(self) -> str:
        """Return the SHA-256 of the loads of all samples and layers; the schedule does not change it."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(str(self.counts_SLE.shape).encode())
        for array in (self.counts_SLE, self.layer_ids.astype(np.int64), self.sample_ids.astype(np.int64)):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def validate(self) -> None:
        """Check shapes and signs; raises TraceError."""
        S, L, E = self.counts_SLE.shape
        check_model_size("demand", L, E)
        if self.layer_ids.shape != (L,) or self.sample_ids.shape != (S,):
            raise TraceError(
                f"demand of {S} samples and {L} layers has ids for {len(self.sample_ids)} and {len(self.layer_ids)}"
            )
        if (self.counts_SLE < 0).any():
            raise TraceError("demand holds negative token counts")
        if self.piece_S is not None and ((self.piece_S < 0) | (self.piece_S >= S)).any():
            raise TraceError("demand holds samples that stay with others which are not there")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduledDemand(Demand):
    """A `Demand` whose samples have a micro-batch and a source rank (`Demand.with_schedule`).

    tokens_MLRE     token-slots that source rank R sends to expert E of layer L in micro-batch M
    micro_batch_S   micro-batch of each sample; -1: left out
    rank_S          source rank of each sample
    group_M         mini-batch or expert-data-parallel group (`of_groups`) of each micro-batch; None: all are in one
    """

    tokens_MLRE: Int32[ndarray, "M L R E"]
    micro_batch_S: Int32[ndarray, " S"]
    rank_S: Int32[ndarray, " S"]
    group_M: Int32[ndarray, " M"] | None = None

    @staticmethod
    def of_groups(demands: Sequence[ScheduledDemand]) -> ScheduledDemand:
        """Concatenate the demands of expert-data-parallel groups, micro-batches in the order of groups.

        Groups share expert parameters and so need the same homes: they are planned together. Raises TraceError when
        there is no group, or groups differ in model or ranks.
        """
        if not demands:
            raise TraceError("no demands to concatenate: pass one per expert-data-parallel group")
        models = {(*demand.layer_ids.tolist(), demand.top_k) for demand in demands}
        if len({demand.tokens_MLRE.shape[1:] for demand in demands}) > 1 or len(models) > 1:
            raise TraceError("every group needs the same layers, ranks, experts and choices per token")
        sizes = [len(demand.tokens_MLRE) for demand in demands]
        micro_batches = [
            np.where(demand.micro_batch_S < 0, -1, demand.micro_batch_S + offset)
            for demand, offset in zip(demands, np.cumsum([0, *sizes[:-1]]), strict=True)
        ]
        pairs = [demand.pairs_LEE for demand in demands if demand.pairs_LEE is not None]
        shared = any(demand.attended_S is not None for demand in demands)
        before = np.cumsum([0, *(len(demand.rank_S) for demand in demands[:-1])])
        pieces = [
            first + (np.arange(len(demand.rank_S)) if demand.piece_S is None else demand.piece_S)
            for first, demand in zip(before, demands, strict=True)
        ]
        return ScheduledDemand(
            counts_SLE=np.concatenate([demand.counts_SLE for demand in demands]),
            layer_ids=demands[0].layer_ids,
            sample_ids=np.concatenate([demand.sample_ids for demand in demands]),
            tokens_MLRE=np.concatenate([demand.tokens_MLRE for demand in demands]),
            micro_batch_S=np.concatenate(micro_batches).astype(np.int32),
            rank_S=np.concatenate([demand.rank_S for demand in demands]),
            group_M=np.repeat(np.arange(len(demands), dtype=np.int32), sizes),
            pairs_LEE=np.sum(pairs, axis=0) if len(pairs) == len(demands) else None,
            attended_S=np.concatenate([demand.attention_S for demand in demands]) if shared else None,
            piece_S=np.concatenate(pieces) if any(demand.piece_S is not None for demand in demands) else None,
            top_k=demands[0].top_k,
        )

    def of_layers(self, layers: Int64[ndarray, " l"]) -> ScheduledDemand:
        """Return the demand of some layers, given as positions on the layer axis, with its schedule."""
        return replace(
            self,
            counts_SLE=self.counts_SLE[:, layers],
            layer_ids=self.layer_ids[layers],
            tokens_MLRE=self.tokens_MLRE[:, layers],
            pairs_LEE=None if self.pairs_LEE is None else self.pairs_LEE[layers],
        )

    def of_micro_batches(self, number_m: slice | Int64[ndarray, " m"]) -> ScheduledDemand:
        """Return the demand of some micro-batches, numbered from 0 in the given order; other samples are left out."""
        M = len(self.tokens_MLRE)
        new_number = np.full(M + 1, -1, dtype=np.int32)  # the last entry: samples left out
        new_number[number_m] = np.arange(len(np.arange(M)[number_m]))
        return replace(
            self,
            tokens_MLRE=self.tokens_MLRE[number_m],
            micro_batch_S=new_number[self.micro_batch_S],
            group_M=None if self.group_M is None else self.group_M[number_m],
        )

    @cached_property
    def load_MLE(self) -> Int64[ndarray, "M L E"]:
        """Return token-slots per micro-batch, layer and expert, over all source ranks; read-only."""
        load_MLE: ndarray = self.tokens_MLRE.sum(axis=2, dtype=np.int64)
        load_MLE.flags.writeable = False  # the array is shared by all callers
        return load_MLE

    def merged(self, first_S: Int[ndarray, " S"]) -> tuple[ScheduledDemand, Int64[ndarray, " S"]]:
        """Return the demand with samples that stay together merged into one, and the merged position of each sample.

        first_S   per sample, the position of the first that it stays with, in the same micro-batch on the same rank
        """
        leads, merged_S = np.unique(first_S, return_inverse=True)
        counts_XLE = np.zeros((len(leads), *self.counts_SLE.shape[1:]), dtype=np.int32)
        attended_X = np.zeros(len(leads), dtype=np.int64)
        np.add.at(counts_XLE, merged_S, self.counts_SLE)
        np.add.at(attended_X, merged_S, self.attention_S)
        merged = replace(
            self,
            counts_SLE=counts_XLE,
            sample_ids=self.sample_ids[leads],
            micro_batch_S=self.micro_batch_S[leads],
            rank_S=self.rank_S[leads],
            attended_S=attended_X,
            piece_S=None,
        )
        return merged, merged_S

    def sum_per_rank(self, value_S: Shaped[ndarray, " S"]) -> Float64[ndarray, "M R"]:
        """Return the sum of a value over the samples of each micro-batch and source rank."""
        M, _, R, _ = self.tokens_MLRE.shape
        kept = np.flatnonzero(self.micro_batch_S >= 0)
        bin_X = self.micro_batch_S[kept].astype(np.int64) * R + self.rank_S[kept]
        return np.bincount(bin_X, value_S[kept], M * R).reshape(M, R).astype(np.float64, copy=False)

    def validate(self) -> None:
        """Check shapes and signs, and that an expert gets at most the token-slots of its samples; raises TraceError."""
        super().validate()
        _, L, E = self.counts_SLE.shape
        if (self.tokens_MLRE.shape[1], self.tokens_MLRE.shape[3]) != (L, E) or (self.tokens_MLRE < 0).any():
            raise TraceError(
                f"scheduled demand has shape {self.tokens_MLRE.shape} or negative counts; layers {L}, experts {E}"
            )
        if (self.tokens_MLRE.sum(axis=(0, 2), dtype=np.int64) > self.counts_SLE.sum(axis=0, dtype=np.int64)).any():
            raise TraceError("the schedule sends more token-slots to an expert than its samples hold")
        place_2S, piece_S = np.stack([self.micro_batch_S, self.rank_S]), self.piece_S
        if piece_S is not None and (place_2S[:, piece_S] != place_2S).any():
            raise TraceError("the schedule parts samples that share a prompt")


_LOAD_BYTES = 64 << 20
"""Largest load array that is counted at once."""


def iterate_micro_batch_load(pieces: Iterable[RoutingTrace], tokens: int) -> Iterator[Int64[ndarray, "M L E"]]:
    """Yield the load of micro-batches of `tokens` consecutive rows of a trace in pieces, as they fill up.

    A micro-batch may span samples and pieces; the last one may be shorter. Raises TraceError when `tokens` < 1.
    """
    if tokens < 1:
        raise TraceError(f"micro-batches of {tokens} tokens: at least 1 token each")
    rest_1LE, filled = None, 0
    for piece in pieces:
        if piece.num_rows == 0:
            continue
        inner = np.arange(tokens - filled, piece.num_rows, tokens, dtype=np.int64)
        bounds = np.concatenate([[0], inner, [piece.num_rows]])
        filled = (filled + piece.num_rows) % tokens
        at_once = max(1, _LOAD_BYTES // (8 * piece.num_layers * piece.num_experts))
        for start in range(0, len(bounds) - 1, at_once):
            some = bounds[start : start + at_once + 1]
            load_MLE = count_token_slots(piece.experts_TLK, piece.valid_T, some, piece.num_experts)
            if rest_1LE is not None:
                load_MLE[:1] += rest_1LE
                rest_1LE = None
            if filled and start + at_once >= len(bounds) - 1:
                load_MLE, rest_1LE = load_MLE[:-1], load_MLE[-1:]
            if len(load_MLE):
                yield load_MLE
    if rest_1LE is not None:
        yield rest_1LE


def count_token_slots(
    experts_TLK: Shaped[ndarray, "T L K"],
    valid_T: Shaped[ndarray, " T"],
    bounds: Int64[ndarray, " N1"],
    num_experts: int,
) -> Int64[ndarray, "N L E"]:
    """Histogram expert ids between consecutive row bounds.

    bounds        N + 1 ascending row numbers; piece `n` is rows `bounds[n]:bounds[n + 1]`
    returns       token-slots per piece, layer and expert
    raises        TraceError when a valid row holds an id out of range, or bounds leave the rows

    >>> count_token_slots(np.array([[[0, 2]], [[2, 1]]], np.uint8), np.ones(2, bool), np.array([0, 1, 2]), 3).tolist()
    [[[1, 0, 1]], [[0, 1, 1]]]
    """
    N, L = len(bounds) - 1, experts_TLK.shape[1]
    check_array_size("counts of token-slots", 8, experts_TLK.nbytes, pieces=N, layers=L, experts=num_experts)
    counts_NLE = np.zeros((N, L, num_experts), dtype=np.int64)
    _add_token_slots(experts_TLK, valid_T, bounds, counts_NLE)
    return counts_NLE


def _add_token_slots(experts_TLK: ndarray, valid_T: ndarray, bounds: ndarray, counts_NLE: ndarray) -> None:
    """Add the token-slots of the rows to `counts_NLE`, after checking bounds and ids."""
    ascending = bool((bounds[1:] >= bounds[:-1]).all())
    if not ascending or bounds[0] < 0 or bounds[-1] > len(experts_TLK) or len(valid_T) != len(experts_TLK):
        raise TraceError(f"row bounds must rise within 0..{len(experts_TLK)}: got {bounds[:3]} ... {bounds[-3:]}")
    row = _count(experts_TLK, valid_T, bounds, counts_NLE)
    if row >= 0:
        raise TraceError(
            f"row {row} holds an expert id beyond the {counts_NLE.shape[2]} experts of its layer: validate the trace"
        )


@compiled
@no_type_check
def _count(experts_TLK: ndarray, valid_T: ndarray, bounds: ndarray, counts_NLE: ndarray) -> int:
    """Count token-slots; return the first row with an id out of range, or -1."""
    _, L, K = experts_TLK.shape
    E = counts_NLE.shape[2]
    for n in range(len(bounds) - 1):
        for t in range(bounds[n], bounds[n + 1]):
            if valid_T[t]:
                for layer in range(L):
                    for k in range(K):
                        expert = experts_TLK[t, layer, k]
                        if expert < 0 or expert >= E:
                            return t
                        counts_NLE[n, layer, expert] += 1
    return -1
