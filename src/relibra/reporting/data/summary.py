"""`Summary`: the numbers that the report shows of recorded routes.

Steps arrive reduced (`routing.trace_statistics`), so that a long run fits into memory, and are combined here. *Rank*
skew is always that of the static layout: rank r has experts r E/R ... (r + 1) E/R - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.errors import TraceError
from relibra.number_ranges import format_ranges
from relibra.routing.statistics import coefficient_of_variation, skew
from relibra.routing.trace_statistics import Group, RankSkew, TraceStatistics, pool_groups, pool_ranks, require_tokens

RANK_COUNTS = (2, 8, 32)
"""Numbers of ranks that every report shows: two processes, one node, four nodes."""

NUM_HOTTEST = 10


@dataclass(frozen=True, kw_only=True)
class HotExpert:
    """One expert of one layer: its share of the layer's load, and that share times the number of experts."""

    layer: int
    expert: int
    share: float
    times_mean: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One RL step, reduced; number None for a trace outside a run."""

    number: int | None
    statistics: TraceStatistics


@dataclass(frozen=True, kw_only=True, eq=False)
class Stability:
    """How alike the micro-batches of a step are, and consecutive steps.

    cosine_mean_L  see `TraceStatistics`, over the micro-batches of all steps; low and high are its range
    chance         what the cosine would be by chance alone
    fluctuation    mean over steps and layers
    step_to_step   mean cosine between a step's load and that of the recorded step before it; None with one step
    """

    micro_batches: int
    cosine_mean_L: Float64[ndarray, " L"]
    cosine_low_L: Float64[ndarray, " L"]
    cosine_high_L: Float64[ndarray, " L"]
    chance: float
    fluctuation: float
    step_to_step: float | None

    @property
    def cosine(self) -> float:
        """Mean over micro-batches and layers."""
        return float(self.cosine_mean_L.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
    """What the report shows of the routes. `M` counts the micro-batches of all steps, in order.

    own_ranks                  expert-parallel ranks of the run itself, None when unknown
    ranks                      numbers of ranks that are reported
    skews                      by ranks, over all micro-batches of all steps; numbers that do not divide the experts are
                               left out
    expert_skew                max / mean *expert* load of all steps together, mean over layers
    coefficient_of_variation   of the same load, median layer
    """

    steps: tuple[Step, ...]
    micro_batch_tokens: int
    layer_ids: Int[ndarray, " L"]
    load_LE: Int64[ndarray, "L E"]
    step_M: Int64[ndarray, " M"]
    own_ranks: int | None
    ranks: tuple[int, ...]
    skews: Mapping[int, RankSkew]
    hottest: tuple[HotExpert, ...]
    stability: Stability
    expert_skew: float
    coefficient_of_variation: float
    groups: tuple[Group, ...]

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return self.load_LE.shape[1]

    @property
    def top_k(self) -> int:
        """Choices per token."""
        return self.steps[0].statistics.top_k

    @property
    def tokens(self) -> int:
        """Valid token rows of all steps."""
        return sum(step.statistics.tokens for step in self.steps)

    @property
    def samples(self) -> int:
        """Samples of all steps."""
        return sum(step.statistics.samples for step in self.steps)

    @property
    def sources(self) -> tuple[str, ...]:
        """The recorders of the steps, each name once."""
        return tuple(dict.fromkeys(step.statistics.source for step in self.steps))

    @property
    def headline(self) -> tuple[int, RankSkew] | None:
        """The headline's rank count (the run's own, else 8, else the largest) and its skew; None with one expert."""
        ranks = min(self.skews, key=lambda ranks: (ranks != self.own_ranks, ranks != 8, -ranks), default=None)
        return None if ranks is None else (ranks, self.skews[ranks])

    def ranks_name(self, ranks: int) -> str:
        """Name a rank count in legends and rows."""
        return f"{ranks} ranks (this run)" if ranks == self.own_ranks else f"{ranks} ranks"


def rank_counts(num_experts: int, own_ranks: int | None) -> tuple[int, ...]:
    """Return the rank counts to report: the standard ones and the run's own, plus E where none of them divides E.

    >>> rank_counts(32, 4), rank_counts(7, None)
    ((2, 4, 8, 32), (2, 7, 8, 32))
    """
    counts = {*RANK_COUNTS, *([own_ranks] if own_ranks and own_ranks > 1 else [])}
    if num_experts > 1 and all(num_experts % ranks for ranks in counts):
        counts.add(num_experts)
    return tuple(sorted(counts))


def possible_ranks(num_experts: int, own_ranks: int | None) -> list[int]:
    """Return those of `rank_counts` that divide the experts."""
    return [ranks for ranks in rank_counts(num_experts, own_ranks) if num_experts % ranks == 0]


def summarize(steps: Sequence[Step], *, own_ranks: int | None = None) -> Summary:
    """Return the summary of one or more steps of one model, whose statistics have the ranks of `possible_ranks`.

    raises      TraceError when there is no token, or steps come from different models
    """
    _check_one_model(steps)
    statistics = [step.statistics for step in steps]
    require_tokens(statistics)
    load_LE = np.sum([part.load_LE for part in statistics], axis=0)
    layer_ids = statistics[0].layer_ids
    groups = [group for group in pool_groups(g for part in statistics for g in part.groups).values() if group.tokens]
    return Summary(
        steps=tuple(steps),
        micro_batch_tokens=next(part.micro_batch_tokens for part in statistics if part.tokens),
        layer_ids=layer_ids,
        load_LE=load_LE,
        step_M=np.repeat([step.number or 0 for step in steps], [part.micro_batches for part in statistics]),
        own_ranks=own_ranks,
        ranks=rank_counts(load_LE.shape[1], own_ranks),
        skews={parts[0].ranks: pool_ranks(parts) for parts in zip(*(part.layouts for part in statistics), strict=True)},
        hottest=hottest_experts(load_LE, layer_ids, NUM_HOTTEST),
        stability=_stability(statistics),
        expert_skew=float(skew(load_LE).mean()),
        coefficient_of_variation=float(np.median(coefficient_of_variation(load_LE))),
        groups=tuple(sorted(groups, key=lambda group: (-group.tokens, group.name))),
    )


def hottest_experts(load_LE: Int64[ndarray, "L E"], layer_ids: Int[ndarray, " L"], limit: int) -> tuple[HotExpert, ...]:
    """Return the experts with the largest shares of their layer's load, ties by (layer, expert).

    >>> hottest_experts(np.array([[3, 1], [2, 2]]), np.array([0, 5]), 1)
    (HotExpert(layer=0, expert=0, share=0.75, times_mean=1.5),)
    """
    total_L1 = load_LE.sum(axis=-1, keepdims=True)
    share_LE = np.divide(load_LE, total_L1, out=np.zeros(load_LE.shape), where=total_L1 > 0)
    order = np.argsort(-share_LE, axis=None, kind="stable")[:limit]
    E = load_LE.shape[1]
    busiest = [(i // E, i % E, float(share_LE.flat[i])) for i in order.tolist()]
    return tuple(
        HotExpert(layer=int(layer_ids[layer]), expert=expert, share=share, times_mean=share * E)
        for layer, expert, share in busiest
    )


def evenly_chosen(num_items: int, limit: int) -> list[int]:
    """Return at most `limit` positions spread over 0 ... num_items - 1, first and last among them (limit 1: the last).

    >>> evenly_chosen(40, 4), evenly_chosen(3, 12), evenly_chosen(5, 1)
    ([0, 13, 26, 39], [0, 1, 2], [4])
    """
    if limit == 1:
        return [num_items - 1]
    return sorted({int(i) for i in np.linspace(0, num_items - 1, min(limit, num_items)).round()})


def _stability(statistics: Sequence[TraceStatistics]) -> Stability:
    filled = [part for part in statistics if part.micro_batches]
    weights = [item.micro_batches for item in filled]
    loads = [item.load_LE.astype(np.float64) for item in filled]
    norms = [np.linalg.norm(load_LE, axis=-1) for load_LE in loads]
    between = [
        float(np.mean((loads[i - 1] * loads[i]).sum(axis=-1) / np.maximum(norms[i - 1] * norms[i], 1e-300)))
        for i in range(1, len(filled))
    ]
    return Stability(
        micro_batches=sum(weights),
        cosine_mean_L=np.average([item.cosine_mean_L for item in filled], axis=0, weights=weights),
        cosine_low_L=np.min([item.cosine_low_L for item in filled], axis=0),
        cosine_high_L=np.max([item.cosine_high_L for item in filled], axis=0),
        chance=float(np.average([item.chance_L.mean() for item in filled], weights=weights)),
        fluctuation=float(np.mean([item.fluctuation_L for item in filled])),
        step_to_step=float(np.mean(between)) if between else None,
    )


def _check_one_model(steps: Sequence[Step]) -> None:
    first = _model(steps[0].statistics)
    for step in steps[1:]:
        if (model := _model(step.statistics)) != first:
            raise TraceError(
                f"step {step.number} has {model}, step {steps[0].number} has {first}: a report is about one model; put "
                "the steps of each model into a folder of their own"
            )


def _model(statistics: TraceStatistics) -> str:
    layers = format_ranges(statistics.layer_ids.tolist())
    return f"{statistics.layers} layers ({layers}) x {statistics.experts} experts, {statistics.top_k} choices per token"
