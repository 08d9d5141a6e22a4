"""Cuts of a model into pipeline stages, from the known seconds of its layers; pure functions of arrays.

The first layer has the dense layers before it, the last one the output matrix. With 1F1B a stage keeps its layers, with
round-robin stages (RoundPipe, arXiv 2604.27085) forward and backward passes are cut apart, and the last forward part is
the first backward part too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.simulation.layout import even_sizes, layer_slices
from relibra.simulation.step.pipeline_schedule import run_tasks, stage_tasks

_MOST_NUMBERS = 4_000_000
"""All cuts are tried if 2 x stages x micro-batches x cuts are at most this many numbers."""
_ROUNDING = 1 + 1e-9


class RoundCut(NamedTuple):
    """Sizes of round-robin stages in expert layers.

    forward    of the forward parts before the fused one, from the first layer
    fused      layers whose backward pass follows their forward pass at once
    backward   of the backward parts after it, from the last layer down
    rounds     per mini-batch; fewer if a round would have fewer micro-batches than devices
    """

    forward: tuple[int, ...]
    fused: int
    backward: tuple[int, ...]
    rounds: int

    def parts(self) -> list[slice]:
        """Return the layers of each part, in the order in which a micro-batch passes them."""
        back = layer_slices((*self.backward[::-1], self.fused))
        return [*layer_slices((*self.forward, self.fused)), *back[-2::-1]]

    def round_M(self, num_micro_batches: int, devices: int) -> Int64[ndarray, " M"]:
        """Return the round of each micro-batch."""
        sizes = even_sizes(num_micro_batches, max(1, min(self.rounds, num_micro_batches // devices)))
        return np.repeat(np.arange(len(sizes)), sizes)


def fill(cost_L: Sequence[float], limit: float) -> tuple[int, ...]:
    """Return sizes of the fewest consecutive parts of at most `limit` each; no single layer costs more."""
    sizes: list[int] = []
    filled = np.inf
    for cost in cost_L:
        if filled + cost > limit * _ROUNDING:
            sizes, filled = [*sizes, 0], 0.0
        sizes[-1], filled = sizes[-1] + 1, filled + cost
    return tuple(sizes)


def spans(cost_L: Sequence[float]) -> list[float]:
    """Return the sums of consecutive layers that are at least the largest layer, ascending: limits worth trying."""
    ends = np.concatenate([[0.0], np.cumsum(cost_L)])
    sums = (ends[None, :] - ends[:, None])[np.triu_indices(len(ends), 1)]
    return np.unique(sums[sums * _ROUNDING >= max(cost_L)]).tolist()


def narrowest_cut(cost_L: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the sizes of exactly `stages` parts, none empty, whose largest cost is the lowest possible."""
    limits = spans(cost_L)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(fill(cost_L, limits[middle])) <= stages else (middle + 1, high)
    sizes = list(fill(cost_L, limits[low]))
    while len(sizes) < stages:
        at = int(np.argmax(sizes))
        sizes[at : at + 1] = [sizes[at] - sizes[at] // 2, sizes[at] // 2]
    return tuple(sizes)


def best_cut(
    seconds_XLM: Float64[ndarray, "X L M"],
    handover_M: Float64[ndarray, " M"],
    stages: int,
    mini_batches: Sequence[Int64[ndarray, ...]],
) -> tuple[int, ...]:
    """Return the cut whose 1F1B ends first: of all where they are few, else of the even and the narrowest one.

    seconds_XLM    of each layer forward and backward, or forward alone
    mini_batches   micro-batches of each; the pipeline drains behind it
    """
    directions, L, M = seconds_XLM.shape
    sum_XLM = np.concatenate([np.zeros((directions, 1, M)), np.cumsum(seconds_XLM, axis=1)], axis=1)

    def ends(cuts: Sequence[tuple[int, ...]]) -> Float64[ndarray, " Y"]:
        end_YD = np.cumsum(cuts, axis=1)
        stage_XYDM = sum_XLM[:, end_YD] - sum_XLM[:, end_YD - np.array(cuts)]
        parts_YXM = np.concatenate([stage_XYDM[0], *(one[:, ::-1] for one in stage_XYDM[1:])], axis=1)
        total_Y = np.zeros(len(cuts))
        for number_M in mini_batches:
            tasks_D = [stage_tasks(s, stages, len(number_M), forward_only=directions == 1) for s in range(stages)]
            handover_XM = np.tile(handover_M[number_M], (parts_YXM.shape[1], 1))
            handover_XM[[0, stages % len(handover_XM)]] = 0.0
            own_YXM = parts_YXM[:, :, number_M]
            total_Y += (run_tasks(tasks_D, own_YXM, handover_XM) + own_YXM).max(axis=(1, 2), initial=0.0)
        return total_Y

    cuts = [even_sizes(L, stages), narrowest_cut(seconds_XLM.sum(axis=(0, 2)).tolist(), stages)]
    if comb(L - 1, stages - 1) * 2 * stages * M <= _MOST_NUMBERS:
        cuts += [tuple(np.diff((0, *some, L)).tolist()) for some in combinations(range(1, L), stages - 1)]
    return cuts[int(np.argmin(ends(cuts)))]


def round_cuts(
    forward_L: Sequence[float], backward_L: Sequence[float], devices: int, micro_batches: int
) -> list[tuple[float, RoundCut]]:
    """Return cuts into round-robin stages and their seconds on full devices, the fastest first.

    Seconds are (M J + D (D - 1)) x the longest part / D for J parts. For each limit on a part's seconds the fewest
    parts are taken, with as many layers in the fused one as fit: the first cut is the best of all.

    backward_L   recomputation included, or in the fused part the forward pass instead: not below forward_L
    """
    L, found = len(forward_L), dict[RoundCut, float]()
    least = max(*forward_L, *backward_L)
    suffix_L = np.cumsum(backward_L[::-1])
    rounds = max(1, micro_batches // devices)
    for limit in (one for side in (forward_L, backward_L) for one in spans(side) if one * _ROUNDING >= least):
        fused = int(np.searchsorted(suffix_L, limit * _ROUNDING, side="right"))
        forward, back = fill(forward_L[: L - fused], limit), fill(backward_L[: L - fused][::-1], limit)
        parts = len(forward) + 1 + len(back)
        seconds = (micro_batches * parts + devices * (devices - 1)) * limit / devices
        cut = RoundCut(forward, fused, back, rounds)
        found[cut] = min(seconds, found.get(cut, np.inf))
    return sorted(((seconds, cut) for cut, seconds in found.items()), key=lambda item: item[0])
