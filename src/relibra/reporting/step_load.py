"""`StepLoad`: one step's routes, reduced to the loads and skews that the report needs.

A micro-batch is a run of consecutive token rows, whatever samples they belong to and whatever rank they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.routing.demand import count_token_slots, micro_batch_load
from relibra.routing.statistics import cosine_to_mean, fluctuation, rank_skew, skew
from relibra.routing.trace import RoutingTrace

DEFAULT_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The samples of one named group (a task, a data set) and the load they make."""

    name: str
    samples: int
    tokens: int
    load_LE: Int64[ndarray, "L E"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoad:
    """One step, reduced.

    step           RL step, None for a trace outside a run
    tokens         valid token rows
    load_LE        token-slots of the whole step
    slots_ML       token-slots per micro-batch and layer; a rest below half a micro-batch is not among the M
    expert_skew_ML busiest expert / mean expert
    rank_skews     ranks -> busiest rank / mean rank `[M, L]`, for the rank counts that divide the experts
    cosine_ML      cosine between the micro-batch's and the step's expert load
    chance_L       what that cosine would be if micro-batches were random draws from the step
    fluctuation_L  how much an expert's share varies over micro-batches, relative to the share
    """

    step: int | None
    samples: int
    tokens: int
    top_k: int
    layer_ids: Int[ndarray, " L"]
    load_LE: Int64[ndarray, "L E"]
    slots_ML: Int64[ndarray, "M L"]
    expert_skew_ML: Float64[ndarray, "M L"]
    rank_skews: Mapping[int, Float64[ndarray, "M L"]]
    cosine_ML: Float64[ndarray, "M L"]
    chance_L: Float64[ndarray, " L"]
    fluctuation_L: Float64[ndarray, " L"]
    groups: tuple[Group, ...]
    source: str


def default_micro_batch_tokens(num_rows: int) -> int:
    """Return the largest power of two, at most 4096, that cuts the rows into eight micro-batches or more.

    >>> default_micro_batch_tokens(90_000), default_micro_batch_tokens(1000), default_micro_batch_tokens(3)
    (4096, 128, 1)
    """
    tokens = DEFAULT_MICRO_BATCH_TOKENS
    while tokens > 1 and tokens * 7 >= num_rows:
        tokens //= 2
    return tokens


def summarize_step(
    trace: RoutingTrace, *, ranks: Sequence[int], micro_batch_tokens: int, step: int | None = None
) -> StepLoad:
    """Reduce one trace to what the report needs of it.

    ranks               rank counts; those that do not divide the experts are passed over
    micro_batch_tokens  rows per micro-batch, >= 1, cut from the trace in order
    """
    load_MLE = micro_batch_load(trace, micro_batch_tokens)
    load_LE = load_MLE.sum(axis=0)
    rest = trace.num_rows % micro_batch_tokens
    if 0 < rest < micro_batch_tokens / 2 and load_MLE[:-1].any():
        load_MLE = load_MLE[:-1]  # a handful of tokens looks skewed by chance
    return StepLoad(
        step=step,
        samples=trace.num_samples,
        tokens=int(trace.valid_T.sum()),
        top_k=trace.top_k,
        layer_ids=trace.layer_ids,
        load_LE=load_LE,
        slots_ML=load_MLE.sum(axis=-1),
        expert_skew_ML=skew(load_MLE),
        rank_skews={count: rank_skew(load_MLE, count) for count in ranks if trace.num_experts % count == 0},
        cosine_ML=cosine_to_mean(load_MLE),
        chance_L=chance_cosine(load_MLE),
        fluctuation_L=fluctuation(load_MLE),
        groups=_groups(trace),
        source=trace.source,
    )


def chance_cosine(load_MLE: Int64[ndarray, "M L E"]) -> Float64[ndarray, " L"]:
    """Return the cosine to the step mean that independent draws from the step's shares would show, per layer.

    With N token-slots in a micro-batch and shares p: E|c|^2 = N^2 sum p^2 + N (1 - sum p^2), so the cosine is about
    sqrt(N sum p^2 / (N sum p^2 + 1 - sum p^2)). N is the mean over micro-batches.
    """
    step_LE = load_MLE.sum(axis=0, dtype=np.float64)
    total_L = step_LE.sum(axis=-1)
    square_L = np.divide((step_LE**2).sum(axis=-1), total_L**2, out=np.ones_like(total_L), where=total_L > 0)
    signal_L = total_L / max(1, len(load_MLE)) * square_L
    noise_L = 1.0 - square_L
    return np.sqrt(np.divide(signal_L, signal_L + noise_L, out=np.ones_like(total_L), where=signal_L > 0))


def _groups(trace: RoutingTrace) -> tuple[Group, ...]:
    if not trace.group_names:
        return ()
    named_S = (trace.group_ids >= 0) & (trace.group_ids < len(trace.group_names))
    group_S = np.where(named_S, trace.group_ids + 1, 0)
    samples_G = np.bincount(group_S, minlength=len(trace.group_names) + 1)  # place 0: samples without a named group
    by_group = trace.select(np.argsort(group_S, kind="stable"))
    bounds = by_group.offsets[np.concatenate([[0], np.cumsum(samples_G)])]
    load_GLE = count_token_slots(by_group.experts_TLK, by_group.valid_T, bounds, trace.num_experts)
    tokens_G = np.diff(np.concatenate([[0], np.cumsum(by_group.valid_T)])[bounds])
    return tuple(
        Group(name=name, samples=int(samples_G[g]), tokens=int(tokens_G[g]), load_LE=load_GLE[g])
        for g, name in enumerate(trace.group_names, start=1)
    )
