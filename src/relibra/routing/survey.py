"""`Survey`: the load statistics of a whole trace, gathered in two passes over its pieces at bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from relibra.errors import TraceError
from relibra.routing.demand import iterate_micro_batch_load
from relibra.routing.statistics import (
    coefficient_of_variation,
    contiguous_homes,
    max_vio,
    rank_load,
    skew,
)
from relibra.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """What `ranks` ranks would see under the static layout: *rank* skew over all (micro-batch, layer) pairs.

    balancedness   sum of mean rank loads / sum of maximal ones, over all pairs
    """

    ranks: int
    skew_mean: float
    skew_median: float
    skew_p95: float
    skew_max: float
    balancedness: float


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Sizes, skew per layout, and how far single micro-batches stray from the whole.

    expert_skew           max / mean *expert* load per (micro-batch, layer), mean
    step_expert_skew      the same for the load of the whole trace, mean over layers
    max_vio               largest violation of an *expert*, per layer of the whole trace, max over layers
    load_cv               coefficient of variation of *expert* load of the whole trace, median layer
    cosine_to_mean        between a micro-batch's *expert* load and the whole trace's, mean over pairs
    """

    samples: int
    rows: int
    valid_rows: int
    layers: int
    experts: int
    top_k: int
    micro_batches: int
    micro_batch_tokens: int
    layouts: tuple[LayoutRow, ...]
    expert_skew: float
    step_expert_skew: float
    max_vio: float
    load_cv: float
    cosine_to_mean: float


def survey(pieces: Callable[[], Iterable[RoutingTrace]], *, ranks: Sequence[int], micro_batch_tokens: int) -> Survey:
    """Gather the statistics of a trace.

    pieces               starts a fresh pass over the trace
    micro_batch_tokens   consecutive rows per micro-batch
    raises               TraceError on damage or an empty trace, ClusterError when ranks do not divide the experts
    """
    samples = rows = valid_rows = 0
    first, total_LE = None, None
    for piece in pieces():
        first = first or piece
        contiguous = [contiguous_homes(piece.num_experts, num_ranks) for num_ranks in ranks]
        samples, rows = samples + piece.num_samples, rows + piece.num_rows
        valid_rows += int(piece.valid_T.sum())
        load_LE = sum(load.sum(axis=0) for load in iterate_micro_batch_load([piece], max(1, piece.num_rows)))
        total_LE = load_LE if total_LE is None else total_LE + load_LE
    if first is None or total_LE is None or rows == 0:
        raise TraceError("the trace holds no rows: there is nothing to survey")

    skews: list[list[np.ndarray]] = [[] for _ in ranks]
    sums = np.zeros((len(ranks), 2))
    expert_skews, cosines = [], []
    for load_MLE in iterate_micro_batch_load(pieces(), micro_batch_tokens):
        for i, (num_ranks, home_E) in enumerate(zip(ranks, contiguous, strict=True)):
            load_MLR = rank_load(load_MLE, home_E, num_ranks)
            skews[i].append(skew(load_MLR))
            sums[i] += load_MLR.mean(axis=-1).sum(), load_MLR.max(axis=-1).sum()
        expert_skews.append(skew(load_MLE))
        norms = np.linalg.norm(load_MLE, axis=-1) * np.linalg.norm(total_LE, axis=-1)
        dot = np.einsum("mle,le->ml", load_MLE, total_LE.astype(np.float64))
        cosines.append(np.divide(dot, norms, out=np.ones_like(dot), where=norms > 0))
    return Survey(
        samples=samples,
        rows=rows,
        valid_rows=valid_rows,
        layers=first.num_layers,
        experts=first.num_experts,
        top_k=first.top_k,
        micro_batches=sum(map(len, cosines)),
        micro_batch_tokens=micro_batch_tokens,
        layouts=tuple(_row(n, np.concatenate(s), *sums[i]) for i, (n, s) in enumerate(zip(ranks, skews, strict=True))),
        expert_skew=float(np.concatenate(expert_skews).mean()),
        step_expert_skew=float(skew(total_LE).mean()),
        max_vio=float(max_vio(total_LE).max()),
        load_cv=float(np.median(coefficient_of_variation(total_LE))),
        cosine_to_mean=float(np.concatenate(cosines).mean()),
    )


def _row(ranks: int, skew_ML: np.ndarray, mean: float, highest: float) -> LayoutRow:
    return LayoutRow(
        ranks=ranks,
        skew_mean=float(skew_ML.mean()),
        skew_median=float(np.median(skew_ML)),
        skew_p95=float(np.percentile(skew_ML, 95)),
        skew_max=float(skew_ML.max()),
        balancedness=mean / highest if highest else 1.0,
    )
