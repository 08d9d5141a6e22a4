"""`Timeline` of a simulated step: the events that the executor records, in its order, and some that it does not.

Made on request only, for chosen ranks, micro-batches and layers: a large step has hundreds of millions of events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.step.group_run import Execution, GroupRun, MiniBatchRun, run_group
from relibra.simulation.step.training_step import costs_of_groups, ends_of_mini_batches, micro_batches_of_groups
from relibra.timeline import MAX_EVENTS, Event, Timeline

_EVENTS_PER_LAYER, _RECOMPUTED = 18, 6
"""Upper limit per rank, micro-batch and layer, forward and backward; how many more with recomputation."""
_FURTHER_STAGES, _RECOMPUTED_STAGES = 4, 2
"""What hierarchical dispatch, with two stages of dispatch and of combine, adds to each of them."""


class _Notes:
    """Events of one part in one group, in order, for the chosen micro-batches, ranks and layers."""

    def __init__(
        self, keep_X: Int64[ndarray, " X"], keep_Y: Int64[ndarray, " Y"], layers: Collection[int] | None
    ) -> None:
        self._keep_X, self._keep_Y, self._layers = keep_X, keep_Y, layers
        self._row_of = {m: row for row, m in enumerate(keep_X.tolist())}
        self._column_of = {r: column for column, r in enumerate(keep_Y.tolist())}
        self._found: list[tuple[str, int, str, ndarray, ndarray, ndarray, ndarray]] = []

    def __call__(
        self,
        stage: str,
        layer: int,
        start_MR: ndarray,
        end_MR: ndarray,
        bytes_MR: ndarray | None,
        who_MR: ndarray | None,
        label: str,
    ) -> None:
        if self._layers is not None and layer not in self._layers:
            return
        nothing_MR = np.zeros_like(start_MR)
        parts = (
            start_MR,
            end_MR - start_MR,
            nothing_MR if bytes_MR is None else bytes_MR,
            nothing_MR == 0 if who_MR is None else who_MR,
        )
        chosen = np.ix_(self._keep_X, self._keep_Y)
        begin, seconds, moved, who = (part_MR[chosen] for part_MR in parts)
        self._found.append((stage, layer, label, begin, seconds, moved, who))

    def events(self, rank: int, group_rank: int, micro_batch: int, position: int, start: float) -> Iterator[Event]:
        """Yield a rank's events of a pass that begins at `start`; `group_rank` and `position` count in its group."""
        if position not in self._row_of:
            return
        at = self._row_of[position], self._column_of[group_rank]
        for stage, layer, label, begin, seconds, moved, who in self._found:
            if who[at]:
                moved_bytes = round(float(moved[at]))
                yield Event(
                    stage, layer, micro_batch, rank, start + float(begin[at]), float(seconds[at]), moved_bytes, label
                )


class _Track(NamedTuple):
    """The run of one group, its events by part, and the plan's numbers of its micro-batches."""

    run: GroupRun
    notes: dict[int, _Notes]
    number_M: Int64[ndarray, " M"]


def simulated_timeline(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution | None = None,
    *,
    ranks: Collection[int] | None = None,
    micro_batches: Collection[int] | None = None,
    layers: Collection[int] | None = None,
    distinct: DistinctRows | None = None,
) -> Timeline:
    """Return the events of `simulate_step`, rank by rank, each in the order in which an executor records them.

    "attention", "experts", "gradients" and "optimizer" are simulated only; everything else is what
    `PlanExecution.timeline()` holds, stage by stage. Time counts from the first micro-batch, after any relocation.

    ranks           as `ParallelLayout` numbers them; None: all
    micro_batches   of the plan; None: all
    layers          decoder layers; -1: events outside of layers; None: all
    distinct        as for `simulate_step`
    raises          ConfigError for ranks outside the step, or more events than a timeline holds; else as
                    `simulate_step`
    """
    how = (how or Execution()).on(cluster)
    numbers = micro_batches_of_groups(plan, demand)
    layout = how.layout(plan.num_ranks, len(numbers))
    chosen = _checked(ranks, layout)
    kept = [[m for m in number_M.tolist() if micro_batches is None or m in micro_batches] for number_M in numbers]
    per_stage = len(plan.layer_ids) // how.pipeline_stages + 2 if layers is None else len(layers)
    per_layer = _EVENTS_PER_LAYER + _RECOMPUTED * how.recompute_activations
    if plan.dispatch == "hierarchical":
        per_layer += _FURTHER_STAGES + _RECOMPUTED_STAGES * how.recompute_activations
    most = len(chosen) * max(map(len, kept)) * per_stage * per_layer
    if most > MAX_EVENTS:
        raise ConfigError(
            f"a timeline of up to {most:,} events, where {MAX_EVENTS:,} are allowed: choose fewer ranks, "
            "micro-batches or layers"
        )
    tracks: list[_Track] = []
    for group, costs in enumerate(costs_of_groups(plan, demand, cluster, model, how, distinct)):
        keep_X = np.flatnonzero(np.isin(numbers[group], kept[group]))
        notes = {}
        num_parts = len(costs) * (2 if how.round_cut is None and not how.forward_only else 1)
        own_D = [
            {layout.rank_in_group(rank) for rank in chosen.tolist() if layout.place(rank) == (stage, group)}
            for stage in range(layout.pipeline_stages)
        ]
        for part in range(num_parts):
            here = own_D if how.round_cut is not None else [own_D[min(part, 2 * len(own_D) - 1 - part)]]
            notes[part] = _Notes(keep_X, np.array(sorted(set().union(*here)), dtype=np.int64), layers)
        tracks.append(_Track(run_group(costs, how, notes), notes, numbers[group]))
    ends = ends_of_mini_batches(plan, [track.run for track in tracks], cluster, model, how)
    events = [event for rank in chosen.tolist() for event in _events_of(rank, layout, tracks, ends, how)]
    return Timeline(
        events=tuple(event for event in events if layers is None or event.layer in layers),
        num_ranks=layout.num_ranks,
        label="simulated",
    )


def _checked(ranks: Collection[int] | None, layout: ParallelLayout) -> Int64[ndarray, " R"]:
    chosen = np.arange(layout.num_ranks) if ranks is None else np.array(sorted(ranks), dtype=np.int64)
    if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < layout.num_ranks:
        raise ConfigError(
            f"a timeline of ranks {chosen[0]} to {chosen[-1]}: the step has ranks 0 to {layout.num_ranks - 1}"
        )
    return chosen


def _events_of(
    rank: int,
    layout: ParallelLayout,
    tracks: list[_Track],
    ends: list[tuple[MiniBatchRun, float, float]],
    how: Execution,
) -> Iterator[Event]:
    """Yield the events of one rank, mini-batch by mini-batch and pass by pass.

    ends   of each mini-batch: the run of the slowest group, seconds of gradients and of the optimizer
    """
    (stage, group), group_rank = layout.place(rank), layout.rank_in_group(rank)
    track, begin = tracks[group], 0.0
    for own, (slowest, gradients, optimizer) in zip(track.run.mini_batches, ends, strict=True):
        for part, m in how.tasks(len(own.start_XM), len(own.number_M))[stage]:
            position = int(own.number_M[m])
            start = begin + float(own.start_XM[part, m])
            number = int(track.number_M[position])
            yield from track.notes[part].events(rank, group_rank, number, position, start)
        begin += slowest.seconds
        for name, seconds in (("gradients", gradients), ("optimizer", optimizer)):
            if seconds:
                yield Event(name, -1, -1, rank, begin, seconds, 0, "")
            begin += seconds
