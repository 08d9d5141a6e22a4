"""`TraceStatistics`: the load statistics of a whole trace, computed at bounded memory.

`relibra trace stats` and the report page both print them. A micro-batch is a run of consecutive rows across samples;
the last one may be shorter, and one without routed tokens is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Int64, Shaped
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.demand import count_token_slots, iterate_micro_batch_load
from relibra.routing.statistics import coefficient_of_variation, contiguous_homes, max_vio, rank_load, skew
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_files import SHARD_ROWS, split_samples

MICRO_BATCH_TOKENS = 2048
"""Largest default (`default_micro_batch_tokens`)."""

DEFAULT_RANKS = (8, 16, 32)

_KEPT_ROWS, _KEPT_LAYERS = 1 << 14, 8
"""Most rows of each half that `keep_halves` returns, and most layers."""

_CELLS_AT_ONCE = 1 << 19
"""Load cells converted to floats at a time: 4 MB an array."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSkew:
    """*Rank* skew of every (micro-batch, layer) pair under the static layout on `ranks` ranks.

    slots, busiest   token-slots of all pairs; of the busiest rank of each pair, summed
    """

    ranks: int
    skew_ML: Float64[ndarray, "M L"]
    slots: int
    busiest: int

    @property
    def skew_mean(self) -> float:
        """Return the mean over pairs, each counted once."""
        return float(self.skew_ML.mean())

    @property
    def skew_median(self) -> float:
        """Return the median over pairs."""
        return float(np.median(self.skew_ML))

    @property
    def skew_p95(self) -> float:
        """Return the 95th percentile over pairs."""
        return float(np.percentile(self.skew_ML, 95))

    @property
    def skew_max(self) -> float:
        """Return the skew of the worst pair."""
        return float(self.skew_ML.max())

    @property
    def skew_weighted(self) -> float:
        """Return the sum over pairs of the busiest rank's load / sum of mean loads: relative expert time, 1 if even.

        Pairs are weighted by their tokens; without tokens the figure is 1.
        """
        return self.busiest * self.ranks / self.slots if self.slots else 1.0

    @property
    def idle_share(self) -> float:
        """Return the share of expert time that ranks wait for the busiest one, mean over ranks."""
        return 1.0 - 1.0 / self.skew_weighted


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Samples of one named group (a task, a data set) and their load."""

    name: str
    samples: int
    tokens: int
    load_LE: Int64[ndarray, "L E"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceStatistics:
    """Sizes, load, skew per layout, and how far micro-batches differ from the whole trace.

    rows, tokens          token rows; those with a recorded route
    load_LE               token-slots of the whole trace
    expert_skew           max / mean *expert* load, mean over (micro-batch, layer) pairs
    cosine_mean_L         cosine between a micro-batch's and the whole trace's *expert* load, mean over micro-batches;
                          low and high are its range
    chance_L              see `chance_cosine`
    fluctuation_L         coefficient of variation of an expert's share of a layer's load, over non-empty micro-batches;
                          mean over experts with weight = load
    """

    samples: int
    rows: int
    tokens: int
    top_k: int
    layer_ids: Int[ndarray, " L"]
    source: str
    groups: tuple[Group, ...]
    load_LE: Int64[ndarray, "L E"]
    micro_batches: int
    micro_batch_tokens: int
    layouts: tuple[RankSkew, ...]
    expert_skew: float
    cosine_mean_L: Float64[ndarray, " L"]
    cosine_low_L: Float64[ndarray, " L"]
    cosine_high_L: Float64[ndarray, " L"]
    chance_L: Float64[ndarray, " L"]
    fluctuation_L: Float64[ndarray, " L"]

    @property
    def layers(self) -> int:
        """Return the number of MoE layers."""
        return self.load_LE.shape[0]

    @property
    def experts(self) -> int:
        """Return the experts per layer."""
        return self.load_LE.shape[1]

    def figures(self) -> dict[str, object]:
        """Return the figures as plain numbers for JSON.

        step_expert_skew   max / mean *expert* load of the whole trace, mean over layers
        max_vio            largest *expert* load / mean - 1 over the whole trace, max over layers
        load_cv            coefficient of variation of *expert* load of the whole trace, median layer
        """
        row = ("ranks", "skew_mean", "skew_median", "skew_p95", "skew_max", "skew_weighted", "idle_share")
        return {
            "samples": self.samples,
            "rows": self.rows,
            "valid_rows": self.tokens,
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "micro_batches": self.micro_batches,
            "micro_batch_tokens": self.micro_batch_tokens,
            "layouts": [{name: getattr(layout, name) for name in row} for layout in self.layouts],
            "expert_skew": self.expert_skew,
            "step_expert_skew": float(skew(self.load_LE).mean()),
            "max_vio": float(max_vio(self.load_LE).max()),
            "load_cv": float(np.median(coefficient_of_variation(self.load_LE))),
            "cosine_to_mean": float(self.cosine_mean_L.mean()),
        }


Pieces = Callable[[], Iterable[RoutingTrace]]
"""Returns a new iterator over the pieces of a trace, as `lambda: iterate_routes(path)`."""

RankChoice = Sequence[int] | Callable[[int], Sequence[int]]
"""Numbers of ranks, or a function that computes them from the number of experts."""


def compute_statistics(pieces: Pieces, *, ranks: RankChoice, micro_batch_tokens: int | None = None) -> TraceStatistics:
    """Compute the statistics of a trace; it is read twice unless it has one piece.

    micro_batch_tokens   consecutive rows per micro-batch; None: `default_micro_batch_tokens`
    raises               TraceError for a damaged trace or one without tokens, ClusterError when ranks do not divide
                         the experts
    """
    result = compute_step_statistics(pieces, ranks=ranks, micro_batch_tokens=micro_batch_tokens)
    require_tokens([result])
    return result


def require_tokens(statistics: Iterable[TraceStatistics]) -> None:
    """Raise TraceError when no token of these steps was routed: without load there is no skew."""
    if not any(one.tokens for one in statistics):
        raise TraceError("no token was routed, so there is no load: record at least one token")


def compute_step_statistics(
    pieces: Pieces, *, ranks: RankChoice, micro_batch_tokens: int | None = None
) -> TraceStatistics:
    """Compute the same as `compute_statistics` for one step of several; it may have no tokens."""
    samples = rows = tokens = num_pieces = 0
    groups: dict[str, Group] = {}
    first: RoutingTrace | None = None
    total_LE: ndarray | None = None
    for piece in pieces():
        if first is None:
            first, total_LE = piece, np.zeros((piece.num_layers, piece.num_experts), dtype=np.int64)
            chosen = ranks(piece.num_experts) if callable(ranks) else ranks
            homes = {count: contiguous_homes(piece.num_experts, count) for count in chosen}
        num_pieces, samples, rows = num_pieces + 1, samples + piece.num_samples, rows + piece.num_rows
        tokens += int(piece.valid_T.sum())
        for part in split_samples(piece, SHARD_ROWS):
            total_LE += _count_groups(part, groups)
    if first is None or total_LE is None:
        raise TraceError("the trace holds no samples: record at least one")
    micro_batch_tokens = micro_batch_tokens or default_micro_batch_tokens(rows)
    again = [first] if num_pieces == 1 else pieces()
    sums = _MicroBatchSums(total_LE, homes)
    for load_MLE in iterate_micro_batch_load(again, micro_batch_tokens):
        sums.add(load_MLE)
    return TraceStatistics(
        samples=samples,
        rows=rows,
        tokens=tokens,
        top_k=first.top_k,
        layer_ids=first.layer_ids,
        source=first.source,
        groups=tuple(groups.values()),
        load_LE=total_LE,
        micro_batch_tokens=micro_batch_tokens,
        chance_L=chance_cosine(total_LE, sums.micro_batches),
        **sums.figures(),
    )


def keep_halves(
    pieces: Iterable[RoutingTrace],
) -> tuple[Shaped[ndarray, "T L K"], Shaped[ndarray, "X L K"], int]:
    """Return routed rows of every second sample, those of the samples between, and the number of experts.

    Of a large trace evenly spaced layers and pairs of samples are kept, and of a large sample its first rows.

    pieces   of one trace, with at least one sample
    """
    kept: list[tuple[int, ndarray]] = []
    number, every, rows, num_experts = 0, 1, 0, 0
    for piece in pieces:
        num_experts, layers = piece.num_experts, slice(None, None, -(-piece.num_layers // _KEPT_LAYERS))
        for start, stop in pairwise(piece.offsets.tolist()):
            if number // 2 % every == 0:
                some = slice(start, min(stop, start + _KEPT_ROWS))
                kept.append((number, piece.experts_TLK[some, layers][piece.valid_T[some]]))
                rows += len(kept[-1][1])
            number += 1
            while rows > _KEPT_ROWS and kept[-1][0] > 1:
                every *= 2
                kept = [(place, some_TLK) for place, some_TLK in kept if place // 2 % every == 0]
                rows = sum(len(some_TLK) for _, some_TLK in kept)
    none_TLK = kept[0][1][:0]
    first, second = (np.concatenate([none_TLK, *(one for n, one in kept if n % 2 == half)]) for half in (0, 1))
    return first, second, num_experts


def default_micro_batch_tokens(num_rows: int) -> int:
    """Return the largest power of two, at most 2048, that cuts the rows into eight micro-batches or more.

    >>> default_micro_batch_tokens(90_000), default_micro_batch_tokens(1000), default_micro_batch_tokens(3)
    (2048, 128, 1)
    """
    tokens = MICRO_BATCH_TOKENS
    while tokens > 1 and tokens * 7 >= num_rows:
        tokens //= 2
    return tokens


def default_ranks(num_experts: int) -> list[int]:
    """Return those of 8, 16 and 32 ranks that divide the experts; if none does, the smallest divisors above 1.

    >>> default_ranks(32), default_ranks(16), default_ranks(12), default_ranks(7), default_ranks(1)
    ([8, 16, 32], [8, 16], [2, 3, 4], [7], [1])
    """
    possible = [ranks for ranks in DEFAULT_RANKS if num_experts % ranks == 0]
    return possible or [ranks for ranks in range(2, num_experts + 1) if num_experts % ranks == 0][:3] or [1]


def pool_ranks(layouts: Sequence[RankSkew]) -> RankSkew:
    """Concatenate the pairs of several steps; all have the same number of ranks."""
    return RankSkew(
        ranks=layouts[0].ranks,
        skew_ML=np.concatenate([layout.skew_ML for layout in layouts]),
        slots=sum(layout.slots for layout in layouts),
        busiest=sum(layout.busiest for layout in layouts),
    )


def pool_groups(groups: Iterable[Group]) -> dict[str, Group]:
    """Add up groups of the same name, in order of first appearance."""
    pooled: dict[str, Group] = {}
    for group in groups:
        known = pooled.get(group.name)
        if known is not None:
            samples, tokens = known.samples + group.samples, known.tokens + group.tokens
            group = Group(name=group.name, samples=samples, tokens=tokens, load_LE=known.load_LE + group.load_LE)
        pooled[group.name] = group
    return pooled


def chance_cosine(load_LE: Int64[ndarray, "L E"], micro_batches: int) -> Float64[ndarray, " L"]:
    """Return the cosine to the whole trace that micro-batches drawn independently from its shares have, per layer.

    With N token-slots in a micro-batch and shares p: E|c|^2 = N^2 sum p^2 + N (1 - sum p^2), so the cosine is about
    sqrt(N sum p^2 / (N sum p^2 + 1 - sum p^2)). N is the mean over micro-batches.
    """
    total_L = load_LE.sum(axis=-1, dtype=np.float64)
    square_L = (load_LE.astype(np.float64) ** 2).sum(axis=-1)
    square_L = np.divide(square_L, total_L**2, out=np.ones_like(total_L), where=total_L > 0)
    signal_L = total_L / max(1, micro_batches) * square_L
    noise_L = 1.0 - square_L
    return np.sqrt(np.divide(signal_L, signal_L + noise_L, out=np.ones_like(total_L), where=signal_L > 0))


class _MicroBatchSums:
    """Running sums over the micro-batches of a trace; only rank skew is kept per pair."""

    def __init__(self, total_LE: ndarray, homes: dict[int, ndarray]) -> None:
        num_layers = len(total_LE)
        self.homes = homes
        self.total_LE = total_LE.astype(np.float64)
        self.share_LE = self.total_LE / np.maximum(1.0, self.total_LE.sum(axis=-1, keepdims=True))
        self.micro_batches = self.slots = 0
        self.skews: dict[int, list[ndarray]] = {ranks: [np.zeros((0, num_layers))] for ranks in homes}
        self.busiest = dict.fromkeys(homes, 0)
        self.expert_skew_sum = 0.0
        self.cosine_sum_L = np.zeros(num_layers)
        self.cosine_low_L, self.cosine_high_L = np.full(num_layers, np.inf), np.full(num_layers, -np.inf)
        self.off_LE, self.off_square_LE = np.zeros_like(self.total_LE), np.zeros_like(self.total_LE)

    def add(self, load_MLE: ndarray) -> None:
        step = max(1, _CELLS_AT_ONCE // max(1, self.total_LE.size))
        for start in range(0, len(load_MLE), step):
            some_MLE = load_MLE[start : start + step]
            self._add(some_MLE[some_MLE.any(axis=(1, 2))])

    def _add(self, load_MLE: ndarray) -> None:
        if not len(load_MLE):
            return
        self.micro_batches += len(load_MLE)
        self.slots += int(load_MLE.sum())
        for ranks, home_E in self.homes.items():
            load_MLR = rank_load(load_MLE, home_E, ranks)
            self.skews[ranks].append(skew(load_MLR))
            self.busiest[ranks] += int(load_MLR.max(axis=-1).sum())
        self.expert_skew_sum += float(skew(load_MLE).sum())
        load_MLE = load_MLE.astype(np.float64)
        norms = np.linalg.norm(load_MLE, axis=-1) * np.linalg.norm(self.total_LE, axis=-1)
        cosine_ML = np.einsum("mle,le->ml", load_MLE, self.total_LE) / norms
        self.cosine_sum_L += cosine_ML.sum(axis=0)
        self.cosine_low_L = np.minimum(self.cosine_low_L, cosine_ML.min(axis=0))
        self.cosine_high_L = np.maximum(self.cosine_high_L, cosine_ML.max(axis=0))
        off_MLE = load_MLE / load_MLE.sum(axis=-1, keepdims=True) - self.share_LE
        self.off_LE += off_MLE.sum(axis=0)
        self.off_square_LE += (off_MLE**2).sum(axis=0)

    def figures(self) -> dict[str, Any]:
        """Return the figures over micro-batches that `TraceStatistics` has, by their names there."""
        M = max(1, self.micro_batches)
        mean_LE = self.off_LE / M
        variance_LE = self.off_square_LE / M - mean_LE**2  # of differences, not of shares: a small variance stays exact
        return {
            "micro_batches": self.micro_batches,
            "layouts": tuple(
                RankSkew(ranks=ranks, skew_ML=np.concatenate(skews), slots=self.slots, busiest=self.busiest[ranks])
                for ranks, skews in self.skews.items()
            ),
            "expert_skew": self.expert_skew_sum / (M * len(self.total_LE)) if self.micro_batches else 1.0,
            "cosine_mean_L": self.cosine_sum_L / M,
            "cosine_low_L": self.cosine_low_L,
            "cosine_high_L": self.cosine_high_L,
            "fluctuation_L": np.sqrt(np.maximum(0.0, variance_LE)).sum(axis=-1),
        }


def _count_groups(trace: RoutingTrace, groups: dict[str, Group]) -> ndarray:
    """Add the load of every named group to `groups`; return the load of all samples."""
    names = trace.group_names
    group_S = np.where((trace.group_ids >= 0) & (trace.group_ids < len(names)), trace.group_ids + 1, 0)
    samples_X = np.bincount(group_S, minlength=len(names) + 1)  # place 0: samples without a named group
    by_group = trace.select(np.argsort(group_S, kind="stable")) if names else trace
    bounds = by_group.offsets[np.concatenate([[0], np.cumsum(samples_X)])]
    load_XLE = count_token_slots(by_group.experts_TLK, by_group.valid_T, bounds, trace.num_experts)
    tokens_X = np.diff(np.concatenate([[0], np.cumsum(by_group.valid_T)])[bounds])
    found = [
        Group(name=name, samples=int(samples_X[g]), tokens=int(tokens_X[g]), load_LE=load_XLE[g])
        for g, name in enumerate(names, start=1)
    ]
    groups.update(pool_groups([*groups.values(), *found]))
    return load_XLE.sum(axis=0)
