"""Difference of two timelines: order of events on each rank, and seconds of each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from relibra.timeline import Event, Timeline

EventKey = tuple[str, int, int]
"""Stage, layer and micro-batch of an event."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage in both timelines: events, seconds of the busiest rank, bytes of all; 0 where it does not occur."""

    stage: str
    events: tuple[int, int]
    seconds: tuple[float, float]
    bytes: tuple[int, int]


class FirstDifference(NamedTuple):
    """First place on a rank where the timelines have different events; None: that timeline has ended.

    event       place among the compared events of the rank
    reordered   the rank has the same events, in another order
    """

    rank: int
    event: int
    first: EventKey | None
    second: EventKey | None
    reordered: bool


@dataclass(frozen=True, kw_only=True)
class TimelineDifference:
    """Result of `diff_timelines`.

    same_order      on every rank, events of the compared stages are the same in the same order
    compared        stages that both timelines have: only their events are compared
    only_first, only_second   stages that just one of them has
    num_events      events of the first timeline that were compared
    wrong_ranks     ranks whose events differ, or have another order; first_difference: where, on the first of them
    stages          side by side, in order of names
    labels          where the figures come from: first, second
    """

    same_order: bool
    compared: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    num_events: int
    wrong_ranks: tuple[int, ...]
    first_difference: FirstDifference | None
    stages: tuple[StageRow, ...]
    labels: tuple[str, str]


def diff_timelines(first: Timeline, second: Timeline) -> TimelineDifference:
    """Compare two timelines of the same step, such as a measured and a simulated one.

    An event is compared by (stage, layer, micro-batch): not by time, bytes and label, which depend on the machine, the
    type of numbers and the writer. Order is that of recording on each rank; order between ranks does not count. A stage
    that one of them never has (only simulated ones have attention and experts, only recorded ones "at home") is not
    compared, but listed in `only_first` or `only_second`.
    """
    names = [{event.stage for event in timeline.events} for timeline in (first, second)]
    compared = names[0] & names[1]
    orders = [_orders(timeline, compared) for timeline in (first, second)]
    wrong = [rank for rank in sorted(orders[0].keys() | orders[1].keys()) if orders[0].get(rank) != orders[1].get(rank)]
    only = [tuple(sorted(names[i] - compared)) for i in (0, 1)]
    return TimelineDifference(
        same_order=not wrong,
        compared=tuple(sorted(compared)),
        only_first=only[0],
        only_second=only[1],
        num_events=sum(map(len, orders[0].values())),
        wrong_ranks=tuple(wrong),
        first_difference=_first_difference(orders, wrong[0]) if wrong else None,
        stages=tuple(_row(stage, first, second) for stage in sorted(names[0] | names[1])),
        labels=(first.label, second.label),
    )


def _orders(timeline: Timeline, compared: set[str]) -> dict[int, list[EventKey]]:
    orders: dict[int, list[EventKey]] = {}
    for event in timeline.events:
        if event.stage in compared:
            orders.setdefault(event.rank, []).append((event.stage, event.layer, event.micro_batch))
    return orders


def _first_difference(orders: Sequence[dict[int, list[EventKey]]], rank: int) -> FirstDifference:
    left, right = (order.get(rank, []) for order in orders)
    pairs = list(zip_longest(left, right))
    at = next(i for i, (item, other) in enumerate(pairs) if item != other)
    return FirstDifference(rank, at, *pairs[at], Counter(left) == Counter(right))


def _row(stage: str, first: Timeline, second: Timeline) -> StageRow:
    found: list[tuple[list[Event], float]] = []
    for timeline in (first, second):
        own = [event for event in timeline.events if event.stage == stage]
        found.append((own, float(timeline.seconds(stage).max(initial=0.0))))
    return StageRow(
        stage=stage,
        events=(len(found[0][0]), len(found[1][0])),
        seconds=(found[0][1], found[1][1]),
        bytes=(sum(event.bytes for event in found[0][0]), sum(event.bytes for event in found[1][0])),
    )
