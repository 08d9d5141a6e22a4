"""Repacking: improve the schedule of another trainer, whose experts stay at home and have no replicas.

Such a trainer decides by length which samples share a micro-batch, and on which data-parallel rank. Its ranks then wait
in every layer for the one whose experts get most token-slots. `repack` exchanges samples between micro-batches to even
these loads out: it calls `pack_samples` with loads of ranks, not of nodes, as no replica evens out the ranks later.
Steps, groups of ranks, numbers of micro-batches and limits of tokens stay as the trainer chose them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, Integer, Shaped
from numpy import ndarray

from relibra.errors import TraceError
from relibra.integrations.expert_layout import ExpertLayout
from relibra.parallel_map import parallel_map
from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.levers.packing import pack_samples
from relibra.routing.demand import count_token_slots

_PROPOSALS, _LEAST_PROPOSALS, _PROPOSALS_OF_SAMPLE = 400_000, 4_000, 2_000
"""Exchanges to try: most to divide among the pools (`_pools`), fewest of a pool, and how many for each sample."""
_TOKEN_SLACK = 0.02
"""Share by which a group's tokens in a micro-batch may exceed the most that the given schedule has in any of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerSchedule:
    """Micro-batches of a trainer, over all its optimizer steps.

    micro_batch_S   of each sample; every rank runs each micro-batch
    rank_S          data-parallel rank of each sample
    step_M          optimizer step of each micro-batch
    num_ranks       data-parallel ranks
    group_ranks     consecutive data-parallel ranks whose samples meet in the same experts; divides `num_ranks`
    """

    micro_batch_S: Int32[ndarray, " S"]
    rank_S: Int32[ndarray, " S"]
    step_M: Int32[ndarray, " M"]
    num_ranks: int
    group_ranks: int

    @property
    def groups(self) -> int:
        """Return the number of groups of ranks, each with all experts."""
        return self.num_ranks // self.group_ranks

    def sum_per_rank(self, value_S: Shaped[ndarray, " S"]) -> Shaped[ndarray, "M R"]:
        """Return the sum of a value over the samples of each micro-batch and data-parallel rank."""
        sum_MR = np.zeros((len(self.step_M), self.num_ranks), dtype=value_S.dtype)
        np.add.at(sum_MR, (self.micro_batch_S, self.rank_S), value_S)
        return sum_MR

    def expert_rank_load(self, share_SLR: Float32[ndarray, "S L R"]) -> Float64[ndarray, "X L R"]:
        """Return the token-slots of each expert-parallel rank, for the X pairs of micro-batch and group."""
        load_XLR = np.zeros((len(self.step_M) * self.groups, *share_SLR.shape[1:]))
        np.add.at(load_XLR, self.micro_batch_S * self.groups + self.rank_S // self.group_ranks, share_SLR)
        return load_XLR


def rank_skew(share_SLR: Float32[ndarray, "S L R"], schedule: TrainerSchedule) -> float:
    """Return the load of the busiest expert-parallel rank / that of the mean one.

    Both are summed over micro-batches, groups of ranks and layers. 1.0 where there is no load.

    >>> schedule = TrainerSchedule(micro_batch_S=np.array([0, 1], np.int32), rank_S=np.zeros(2, np.int32),
    ...                            step_M=np.zeros(2, np.int32), num_ranks=1, group_ranks=1)
    >>> rank_skew(np.array([[[3, 1]], [[2, 2]]], np.float32), schedule)
    1.25
    """
    return _skew(schedule.expert_rank_load(share_SLR))


def attention_skew(attention_S: Float64[ndarray, " S"], schedule: TrainerSchedule) -> float:
    """Return the attention of the busiest data-parallel rank of a group / that of the mean one.

    Both are summed over micro-batches and groups. 1.0 where there is none.
    """
    return _skew(schedule.sum_per_rank(attention_S).reshape(-1, schedule.group_ranks))


def _skew(load_R: Shaped[ndarray, "*batch R"]) -> float:
    mean = float(load_R.mean(axis=-1).sum()) if load_R.size else 0.0
    return float(load_R.max(axis=-1).sum()) / mean if mean else 1.0


def lowest_skew(share_SLR: Float32[ndarray, "S L R"], schedule: TrainerSchedule) -> float:
    """Return a lower bound of the skew of all schedules whose samples stay in their step and group of ranks.

    It is reached where the experts of every rank have the same share of each micro-batch as of the whole step.
    """
    steps = np.arange(int(schedule.step_M.max(initial=-1)) + 1, dtype=np.int32)
    return rank_skew(share_SLR, replace(schedule, micro_batch_S=schedule.step_M[schedule.micro_batch_S], step_M=steps))


def repack(
    share_SLR: Float32[ndarray, "S L R"],
    length_S: Int64[ndarray, " S"],
    schedule: TrainerSchedule,
    *,
    rank_tokens: int | None = None,
    attention_S: Float64[ndarray, " S"] | None = None,
    keep_ranks: bool = False,
    keep_counts: bool = False,
) -> TrainerSchedule:
    """Return the schedule with samples exchanged inside their optimizer step and group of ranks.

    Loads and attention together are never worse than given. Where samples may change ranks, each step and group is
    packed twice, with changes and without, in threads, and the better result is taken. Every (micro-batch, rank) that
    has samples keeps at least one.

    share_SLR     token-slots of each sample at the experts of each expert-parallel rank, per layer
    length_S      tokens of each sample
    rank_tokens   most tokens of a rank with several samples in a micro-batch; raised to the most that the given
                  schedule has on such a rank. None: the most of any rank of the given schedule
    attention_S   price of each sample's attention in all layers, in token-slots of an expert-parallel rank; None: 0
    keep_ranks    samples stay on their data-parallel rank
    keep_counts   every rank keeps the number of its samples in each micro-batch
    """
    prices_S = np.zeros(len(length_S)) if attention_S is None else attention_S
    limits = _limits(length_S, schedule, rank_tokens)
    in_all = min(_PROPOSALS, _PROPOSALS_OF_SAMPLE * len(length_S))
    pools = list(_pools(schedule))
    ways = (True,) if keep_ranks else (False,) if schedule.group_ranks == 1 else (False, True)

    def pack(number: int) -> tuple[float, Int32[ndarray, " S"], Int32[ndarray, " S"]]:
        """Return the cost of a pool, packed one way, with micro-batch and rank of its samples."""
        samples, batches, first_rank = pools[number // len(ways)]
        keep = ways[number % len(ways)]
        share_sLR, price_s = share_SLR[samples], prices_S[samples]
        batch_s, rank_s = pack_samples(
            share_sLR,
            np.searchsorted(batches, schedule.micro_batch_S[samples]),
            schedule.rank_S[samples] - first_rank,
            length_S[samples],
            schedule.group_ranks,
            np.ones(len(batches), dtype=bool),
            limits=limits,
            attention_S=price_s,
            proposals=max(_LEAST_PROPOSALS, in_all * len(samples) // len(length_S)),
            seed=0,
            keep_ranks=keep,
            keep_counts=keep_counts,
            far_swaps=not keep,
        )
        cost = _waiting(share_sLR, price_s, batch_s, rank_s)
        return cost, batches[batch_s].astype(np.int32), (rank_s + first_rank).astype(np.int32)

    packed = parallel_map(pack, len(pools) * len(ways))
    micro_batch_S, rank_S = schedule.micro_batch_S.copy(), schedule.rank_S.copy()
    for number, (samples, _, _) in enumerate(pools):
        candidates = packed[number * len(ways) : (number + 1) * len(ways)]
        _, micro_batch_S[samples], rank_S[samples] = min(candidates, key=lambda candidate: candidate[0])
    return replace(schedule, micro_batch_S=micro_batch_S, rank_S=rank_S)


def _pools(schedule: TrainerSchedule) -> Iterator[tuple[Int64[ndarray, " s"], Int64[ndarray, " m"], int]]:
    """Yield the samples that may be exchanged with one another, their micro-batches, and the first of their ranks."""
    group_S = schedule.rank_S // schedule.group_ranks
    for step in range(int(schedule.step_M.max(initial=-1)) + 1):
        batches = np.flatnonzero(schedule.step_M == step)
        inside_S = (schedule.step_M == step)[schedule.micro_batch_S]
        for group in range(schedule.groups):
            samples = np.flatnonzero(inside_S & (group_S == group))
            if len(samples):
                yield samples, batches, group * schedule.group_ranks


def _waiting(
    share_SLR: Float32[ndarray, "S L R"],
    attention_S: Float64[ndarray, " S"],
    micro_batch_S: Int32[ndarray, " S"],
    rank_S: Int32[ndarray, " S"],
) -> float:
    """Return what a pool waits for: the busiest expert-parallel rank of each layer, and the longest attention."""
    batches, R2 = int(micro_batch_S.max()) + 1, int(rank_S.max()) + 1
    load_MLR, attention_MR = np.zeros((batches, *share_SLR.shape[1:])), np.zeros((batches, R2))
    np.add.at(load_MLR, micro_batch_S, share_SLR)
    np.add.at(attention_MR, (micro_batch_S, rank_S), attention_S)
    return float(load_MLR.max(axis=2).sum() + attention_MR.max(axis=1).sum())


def _limits(length_S: Int64[ndarray, " S"], schedule: TrainerSchedule, rank_tokens: int | None) -> ScheduleLimits:
    """Return limits that the given schedule keeps, the same for all optimizer steps."""
    tokens_MR, squares_MR = schedule.sum_per_rank(length_S), schedule.sum_per_rank(length_S**2)
    several_MR: Bool[ndarray, "M R"] = schedule.sum_per_rank(np.ones_like(length_S)) > 1
    most = int(tokens_MR.max(initial=0)) if rank_tokens is None else rank_tokens
    most = max(most, int(tokens_MR[several_MR].max(initial=0)))
    tokens_MG = tokens_MR.reshape(len(tokens_MR), schedule.groups, schedule.group_ranks).sum(axis=2)
    return ScheduleLimits(
        rank_tokens=most,
        rank_attention=int(squares_MR[tokens_MR <= most].max(initial=0)),
        micro_batch_tokens=float(tokens_MG.max(initial=0)) * (1 + _TOKEN_SLACK),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RepackedStep:
    """The new schedule of all optimizer steps of one rollout, and what it changed.

    skew        load of the busiest expert-parallel rank / of the mean one, before and after
    lowest      lower bound of the skew of any schedule; a skew below it needs other homes or replicas
    attention   attention of the busiest data-parallel rank / of the mean one, before and after
    fullest     most tokens of a data-parallel rank in a micro-batch, before and after
    limit       tokens that a rank may have; None: not stated
    seconds     wall clock of planning
    """

    schedule: TrainerSchedule
    skew: tuple[float, float]
    lowest: float
    attention: tuple[float, float]
    fullest: tuple[int, int]
    limit: int | None
    seconds: float

    def line(self, what: str) -> str:
        """Return the line of the log, "relibra: update of 64 samples ...: expert rank skew 1.412 -> 1.220 ..."."""
        schedule = self.schedule
        limit = "" if self.limit is None else f" of {self.limit:,}"
        return (
            f"relibra: {what} of {len(schedule.rank_S):,} samples in {len(schedule.step_M)} micro-batches on "
            f"{schedule.num_ranks} data-parallel ranks: expert rank skew {self.skew[0]:.3f} -> {self.skew[1]:.3f} (no "
            f"schedule is below {self.lowest:.3f}), attention skew {self.attention[0]:.3f} -> {self.attention[1]:.3f}; "
            f"fullest rank {self.fullest[0]:,} -> {self.fullest[1]:,}{limit} tokens; planned in {self.seconds:.1f} s"
        )


def repack_step(
    share_SLR: Float32[ndarray, "S L R"],
    length_S: Int64[ndarray, " S"],
    given: TrainerSchedule,
    layout: ExpertLayout,
    *,
    rank_tokens: int | None,
    since: float,
    keep_ranks: bool = False,
    keep_counts: bool = False,
) -> RepackedStep:
    """Return the given schedule with samples exchanged so that loads of expert-parallel ranks are more even.

    Other arguments as in `repack`.

    since   `time.perf_counter()` when work on this step began
    """
    attention_S = layout.attention_prices(length_S)
    schedule = repack(
        share_SLR,
        length_S,
        given,
        rank_tokens=rank_tokens,
        attention_S=attention_S,
        keep_ranks=keep_ranks,
        keep_counts=keep_counts,
    )
    return RepackedStep(
        schedule=schedule,
        skew=(rank_skew(share_SLR, given), rank_skew(share_SLR, schedule)),
        lowest=lowest_skew(share_SLR, given),
        attention=(attention_skew(attention_S, given), attention_skew(attention_S, schedule)),
        fullest=(_fullest(given, length_S), _fullest(schedule, length_S)),
        limit=rank_tokens,
        seconds=time.perf_counter() - since,
    )


def _fullest(schedule: TrainerSchedule, length_S: Int64[ndarray, " S"]) -> int:
    return int(schedule.sum_per_rank(length_S).max(initial=0))


def count_samples(
    routes: Sequence[Any], length_S: Int64[ndarray, " S"], *, num_experts: int, num_ranks: int
) -> tuple[Int64[ndarray, "S L R"], Bool[ndarray, " L"]]:
    """Return token-slots of each sample at the experts of each rank, and which layers have experts.

    Rows that are -1, and with more than one choice also rows that are zero in all layers, hold no route. A layer whose
    every choice is expert 0 is dense, or was not captured.

    routes      of each sample: integers [rows, layers, choices], one row per token or one less; arrays of numpy or CPU
                tensors. `routes[s]` is read once per sample, in one of several threads, and not kept
    length_S    tokens of each sample
    num_ranks   divides `num_experts`; rank r holds experts r E / R ... (r + 1) E / R - 1
    raises      TraceError for a missing sample, another shape, and ids out of range
    """
    if len(routes) != len(length_S):
        raise TraceError(f"{len(length_S)} samples are scheduled, and {len(routes)} have routes")
    if not len(routes):
        raise TraceError("no samples are scheduled")

    def count(s: int) -> tuple[tuple[int, ...], Int64[ndarray, "L E"]]:
        ids_TLK = _checked(f"sample {s}", routes[s], int(length_S[s]))
        return ids_TLK.shape[1:], _count(f"sample {s}", ids_TLK, num_experts)

    counted = parallel_map(count, len(routes))
    shapes = {shape for shape, _ in counted}
    if len(shapes) > 1:
        raise TraceError(f"samples have routes of different layers and choices: {sorted(shapes)[:3]}")
    counts, L = [counts_LE for _, counts_LE in counted], shapes.pop()[0]
    share_SLR = np.stack([item.reshape(L, num_ranks, num_experts // num_ranks).sum(axis=2) for item in counts])
    used_L = np.logical_or.reduce([item[:, 1:].any(axis=1) for item in counts])
    return share_SLR, used_L


def of_used_layers(share_SLR: Int64[ndarray, "S L R"], used_L: Bool[ndarray, " L"]) -> Float32[ndarray, "S l R"]:
    """Return the token-slots in layers that have experts.

    raises    TraceError where no layer has
    """
    if not used_L.any():
        raise TraceError("all recorded choices are expert 0: the engine captured nothing")
    return share_SLR[:, used_L].astype(np.float32)


def _checked(where: str, routes: Any, tokens: int) -> Integer[ndarray, "T L K"]:
    """Return the routes of a sample as an array; raises TraceError where they are missing or of another shape."""
    if routes is None:
        raise TraceError(f"{where} has no routes")
    try:
        array = np.asarray(routes)
    except (TypeError, ValueError, RuntimeError) as error:  # bfloat16, ragged lists, a tensor that is not on the CPU
        raise TraceError(f"{where} has routes that are no array of numpy ({error}): expected integers") from error
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
        raise TraceError(
            f"{where} has routes of type {array.dtype} and shape {array.shape}: expected integers [rows, layers, "
            "choices]"
        )
    if not tokens - 1 <= len(array) <= tokens:
        raise TraceError(f"{where} has {len(array):,} rows for {tokens:,} tokens: expected one for each, or one less")
    return array


def _count(where: str, ids_TLK: Integer[ndarray, "T L K"], num_experts: int) -> Int64[ndarray, "L E"]:
    """Return the token-slots of each layer and expert; raises TraceError where an id is none of an expert."""
    recorded_T = _recorded(ids_TLK)
    try:
        [counts_LE] = count_token_slots(ids_TLK, recorded_T, np.array([0, len(ids_TLK)]), num_experts)
    except TraceError as error:
        illegal_TL = recorded_T[:, None] & ((ids_TLK < 0) | (ids_TLK >= num_experts)).any(axis=2)
        position, layer = np.argwhere(illegal_TL)[0].tolist()
        raise TraceError(
            f"{where} has the expert ids {ids_TLK[position, layer].tolist()} at position {position} in layer {layer} "
            f"of those recorded, beyond the {num_experts} experts of the model; a row without a route is -1 in all "
            "layers"
        ) from error
    return counts_LE


def _recorded(ids_TLK: Integer[ndarray, "T L K"]) -> Bool[ndarray, " T"]:
    """Return which rows hold a route."""
    valid_T = np.ones(len(ids_TLK), dtype=bool)
    suspects = np.flatnonzero(ids_TLK[:, -1, 0] <= 0)  # few: most rows choose another expert there
    rows_TLK = ids_TLK[suspects]
    absent_T = (rows_TLK == -1).all(axis=(1, 2))
    if ids_TLK.shape[2] > 1:
        absent_T |= ~rows_TLK.any(axis=(1, 2))
    valid_T[suspects[absent_T]] = False
    return valid_T
