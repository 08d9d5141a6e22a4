"""`Summary`: everything the report shows of the routes, as numbers. No HTML, no files.

Steps arrive reduced (`summarize_step`), so that a long run fits into memory, and are put together here. *Rank* skew is
always that of the static contiguous layout: rank r holds experts r E/R ... (r + 1) E/R - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.errors import TraceError
from relibra.reporting.step_load import Group, StepLoad
from relibra.routing.statistics import coefficient_of_variation, skew

RANK_COUNTS = (2, 8, 32)
"""Expert-parallel sizes that every report looks at: two processes on a desk, one node, four nodes."""

NUM_HOTTEST = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class RankView:
    """What an expert-parallel group of `ranks` would see, over all micro-batches of all steps.

    skew_ML     rank skew; None when the ranks do not divide the experts
    mean        mean over micro-batches and layers, weighted by token-slots: busiest-rank work / mean work
    is_own      the run itself used this many ranks
    """

    ranks: int
    is_own: bool
    skew_ML: Float64[ndarray, "M L"] | None
    median: float = 1.0
    p95: float = 1.0
    mean: float = 1.0

    @property
    def idle(self) -> float:
        """Share of the expert time that ranks wait, averaged over ranks: 1 - 1 / mean skew."""
        return 1.0 - 1.0 / self.mean


@dataclass(frozen=True, kw_only=True)
class HotExpert:
    """One expert of one layer: its share of the layer's load, and that share times the number of experts."""

    layer: int
    expert: int
    share: float
    times_mean: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Stability:
    """How alike the micro-batches of a step are, and one step and the next.

    cosine_ML      see `StepLoad`, all steps; `cosine` is the mean, `chance` what chance alone would give
    fluctuation    mean over steps and layers
    step_to_step   mean cosine between a step's load and that of the recorded step before it; None with one step
    """

    cosine_ML: Float64[ndarray, "M L"]
    cosine: float
    chance: float
    fluctuation: float
    step_to_step: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
    """What the report shows of the routes. `M` counts the micro-batches of all steps, in order."""

    steps: tuple[StepLoad, ...]
    micro_batch_tokens: int
    layer_ids: Int[ndarray, " L"]
    load_LE: Int64[ndarray, "L E"]
    step_M: Int64[ndarray, " M"]
    rank_views: tuple[RankView, ...]
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
        return self.steps[0].top_k

    @property
    def tokens(self) -> int:
        """Valid token rows of all steps."""
        return sum(step.tokens for step in self.steps)

    @property
    def samples(self) -> int:
        """Samples of all steps."""
        return sum(step.samples for step in self.steps)

    @property
    def sources(self) -> tuple[str, ...]:
        """Who recorded the steps, each name once."""
        return tuple(dict.fromkeys(step.source for step in self.steps))

    @property
    def possible(self) -> tuple[RankView, ...]:
        """The rank counts that divide the experts."""
        return tuple(view for view in self.rank_views if view.skew_ML is not None)

    @property
    def headline(self) -> RankView | None:
        """The rank count to speak of first: the run's own, else 8, else the largest possible; None: one expert only."""
        ordered = sorted(self.possible, key=lambda view: (not view.is_own, view.ranks != 8, -view.ranks))
        return ordered[0] if ordered else None


def rank_counts(num_experts: int, own_ranks: int | None) -> tuple[int, ...]:
    """Return the rank counts to report: the standard ones and the run's own, plus E where none of them divides E.

    >>> rank_counts(32, 4), rank_counts(7, None)
    ((2, 4, 8, 32), (2, 7, 8, 32))
    """
    counts = {*RANK_COUNTS, *([own_ranks] if own_ranks and own_ranks > 1 else [])}
    if num_experts > 1 and all(num_experts % ranks for ranks in counts):
        counts.add(num_experts)
    return tuple(sorted(counts))


def summarize(steps: Sequence[StepLoad], *, micro_batch_tokens: int, own_ranks: int | None = None) -> Summary:
    """Put reduced steps of one model together.

    own_ranks   expert-parallel ranks of the run itself, None when unknown
    raises      TraceError when there is no step or token, or steps come from different models
    """
    _refuse_a_mixture(steps)
    slots_ML = np.concatenate([step.slots_ML for step in steps])
    load_LE = np.sum([step.load_LE for step in steps], axis=0)
    layer_ids = steps[0].layer_ids
    return Summary(
        steps=tuple(steps),
        micro_batch_tokens=micro_batch_tokens,
        layer_ids=layer_ids,
        load_LE=load_LE,
        step_M=np.repeat([step.step or 0 for step in steps], [len(step.slots_ML) for step in steps]),
        rank_views=tuple(
            _rank_view(steps, slots_ML, ranks, own_ranks) for ranks in rank_counts(load_LE.shape[1], own_ranks)
        ),
        hottest=hottest_experts(load_LE, layer_ids, NUM_HOTTEST),
        stability=_stability(steps),
        expert_skew=float(np.median(skew(load_LE))),
        coefficient_of_variation=float(np.median(coefficient_of_variation(load_LE))),
        groups=_pool_groups(steps),
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
    places = [(i // E, i % E, float(share_LE.flat[i])) for i in order.tolist()]
    return tuple(
        HotExpert(layer=int(layer_ids[layer]), expert=expert, share=share, times_mean=share * E)
        for layer, expert, share in places
    )


def evenly_chosen(num_items: int, limit: int) -> list[int]:
    """Return at most `limit` positions spread over 0 ... n-1, first and last among them.

    >>> evenly_chosen(40, 4), evenly_chosen(3, 12), evenly_chosen(5, 1)
    ([0, 13, 26, 39], [0, 1, 2], [4])
    """
    if limit == 1:
        return [num_items - 1]
    return sorted({int(i) for i in np.linspace(0, num_items - 1, min(limit, num_items)).round()})


def _rank_view(steps: Sequence[StepLoad], slots_ML: ndarray, ranks: int, own_ranks: int | None) -> RankView:
    if ranks not in steps[0].rank_skews:
        return RankView(ranks=ranks, is_own=ranks == own_ranks, skew_ML=None)
    skew_ML = np.concatenate([step.rank_skews[ranks] for step in steps])
    counted = skew_ML[slots_ML > 0]  # a micro-batch of padding only has no skew to speak of
    return RankView(
        ranks=ranks,
        is_own=ranks == own_ranks,
        skew_ML=skew_ML,
        median=float(np.median(counted)),
        p95=float(np.quantile(counted, 0.95)),
        mean=float(np.average(skew_ML, weights=slots_ML)),
    )


def _stability(steps: Sequence[StepLoad]) -> Stability:
    loads = [step.load_LE.astype(np.float64) for step in steps]
    norms = [np.linalg.norm(load_LE, axis=-1) for load_LE in loads]
    between = [
        float(np.mean((loads[i - 1] * loads[i]).sum(axis=-1) / np.maximum(norms[i - 1] * norms[i], 1e-300)))
        for i in range(1, len(steps))
    ]
    cosine_ML = np.concatenate([step.cosine_ML for step in steps])
    return Stability(
        cosine_ML=cosine_ML,
        cosine=float(cosine_ML.mean()),
        chance=float(np.average([step.chance_L.mean() for step in steps], weights=[len(s.slots_ML) for s in steps])),
        fluctuation=float(np.mean([step.fluctuation_L for step in steps])),
        step_to_step=float(np.mean(between)) if between else None,
    )


def _pool_groups(steps: Sequence[StepLoad]) -> tuple[Group, ...]:
    by_name: dict[str, list[Group]] = {}
    for step in steps:
        for group in step.groups:
            by_name.setdefault(group.name, []).append(group)
    pooled = [
        Group(
            name=name,
            samples=sum(group.samples for group in parts),
            tokens=sum(group.tokens for group in parts),
            load_LE=np.sum([group.load_LE for group in parts], axis=0),
        )
        for name, parts in by_name.items()
    ]
    return tuple(sorted((group for group in pooled if group.tokens), key=lambda group: (-group.tokens, group.name)))


def _refuse_a_mixture(steps: Sequence[StepLoad]) -> None:
    if not any(step.tokens for step in steps):
        raise TraceError("no token of the recording was routed, so there is nothing to report: record at least one")
    first = steps[0]
    for step in steps[1:]:
        if _model(step) != _model(first):
            raise TraceError(
                f"step {step.step} has {_model_in_words(step)}, step {first.step} has {_model_in_words(first)}: "
                "a report is about one model; put the steps of each model into a folder of their own"
            )


def _model(step: StepLoad) -> tuple[object, ...]:
    return (*step.load_LE.shape, step.top_k, *step.layer_ids.tolist())


def _model_in_words(step: StepLoad) -> str:
    num_layers, num_experts = step.load_LE.shape
    return f"{num_layers} layers x {num_experts} experts, {step.top_k} choices per token"
