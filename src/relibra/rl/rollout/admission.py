"""Which responses are sampled in a step, and on which rank: unfinished ones first, new ones in the free slots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

import numpy as np

from relibra.errors import TraceError
from relibra.rl.rollout.response import Response


@dataclass(frozen=True, kw_only=True)
class SampleCursor:
    """Samples that have not begun, the same on all ranks.

    next_sample   no response from this id on has begun
    passed_over   ids below it that have not begun either, ascending: spares that got no slot; they begin first in the
                  next step
    """

    next_sample: int = 0
    passed_over: tuple[int, ...] = ()

    @property
    def started(self) -> int:
        """Responses that have begun since the start of the run."""
        return self.next_sample - len(self.passed_over)

    def ids(self) -> Iterator[int]:
        """Return sample ids in the order in which they begin, without end."""
        return chain(self.passed_over, count(self.next_sample))

    def without(self, begun: Collection[int]) -> SampleCursor:
        """Return the cursor after these samples have begun.

        >>> SampleCursor(next_sample=6, passed_over=(2,)).without([2, 7, 9])
        SampleCursor(next_sample=10, passed_over=(6, 8))
        """
        next_sample = max(self.next_sample, max(begun, default=-1) + 1)
        waiting, gone = chain(self.passed_over, range(self.next_sample, next_sample)), set(begun)
        passed_over = tuple(sample for sample in waiting if sample not in gone)
        assert len(passed_over) + self.started + len(begun) == next_sample, "a response begins twice"
        return SampleCursor(next_sample=next_sample, passed_over=passed_over)

    def spares(self, rank: int, num_ranks: int) -> Iterator[int]:
        """Return the ids that a rank may begin in the middle of a step, without end; ranks share none."""
        return islice(self.ids(), rank, None, num_ranks)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Responses of a step when it begins.

    rank_of   rank of each response, by sample id: unfinished ones first, then new ones
    begun     sample ids that begin with the step, ascending
    cursor    samples that have not begun after that
    """

    rank_of: dict[int, int]
    begun: list[int]
    cursor: SampleCursor


def plan_admission(
    live: Sequence[tuple[int, int]],
    slots: int,
    cursor: SampleCursor,
    num_ranks: int,
    kept_on: Mapping[int, int] | None = None,
) -> Admission:
    """Assign every live response to a rank, and begin one new response per free slot.

    Every slot has a response when the step begins. Responses go to the ranks in turn, those
    with most windows first, then by id: counts differ by at most one, and long prefixes that have to be fed again are
    distributed evenly.

    live      (sample id, windows so far) of the unfinished responses of all ranks, in any order
    slots     responses sampled at once, over all ranks
    kept_on   rank by sample id, of responses whose keys and values are there: they stay, while the rank has slots

    >>> plan_admission([(4, 1), (1, 2)], slots=4, cursor=SampleCursor(next_sample=6), num_ranks=2)
    Admission(rank_of={1: 0, 4: 1, 6: 0, 7: 1}, begun=[6, 7], cursor=SampleCursor(next_sample=8, passed_over=()))
    """
    assert len(live) <= slots, f"{len(live)} responses are under way, and a step has {slots} slots"
    assert len({sample_id for sample_id, _ in live}) == len(live), "a response is live twice"
    waiting = set(cursor.passed_over)
    assert all(sample_id < cursor.next_sample and sample_id not in waiting for sample_id, _ in live), (
        "a response is live that never started"
    )
    begun = list(islice(cursor.ids(), slots - len(live)))
    unfinished = [sample_id for sample_id, _ in sorted(live, key=lambda one: (-one[1], one[0]))]
    order = [*unfinished, *begun]
    free_R = [len(range(rank, slots, num_ranks)) for rank in range(num_ranks)]
    rank_of: dict[int, int] = {}
    for sample_id, rank in (kept_on or {}).items():
        if rank < num_ranks and free_R[rank]:
            rank_of[sample_id], free_R[rank] = rank, free_R[rank] - 1
    places = (rank for turn in range(slots) for rank in range(num_ranks) if turn < free_R[rank])
    rank_of |= zip([sample_id for sample_id in order if sample_id not in rank_of], places, strict=True)
    return Admission(
        rank_of=rank_of,
        begun=begun,
        cursor=cursor.without(begun),
    )


def check_no_response_lost(
    *, started: int, finished: int, live: Sequence[tuple[int, int]], slots: int, max_windows: int
) -> None:
    """Assert after a step that started = finished + live, and that no response has too many windows.

    started, finished   responses since the start of the run, over all ranks
    live                (sample id, windows so far) of the unfinished ones, over all ranks
    max_windows         a response with this many windows is finished
    """
    assert started == finished + len(live), (
        f"{started} responses started, {finished} finished and {len(live)} are under way: some were lost"
    )
    assert len(live) <= slots, f"{len(live)} responses are under way, and a step has {slots} slots"
    for sample_id, windows in live:
        assert 0 < windows < max_windows, f"sample {sample_id} goes on after {windows} windows of {max_windows}"


def check_versions(responses: Sequence[Response], weight_version: int, ahead: int = 0) -> None:
    """Check that every token of the last windows was sampled by the weights that the step starts from.

    ahead     versions by which those weights may be older (`rollout.ahead`)
    raises    TraceError naming the first token of another version: its probability ratio would be wrong
    """
    for response in responses:
        own_w = response.versions_r[response.length - response.window_length :]
        if (other := np.flatnonzero((own_w > weight_version) | (own_w < weight_version - ahead))).size:
            position = response.length - response.window_length + int(other[0])
            raise TraceError(
                f"sample {response.sample_id}: response token {position} of the window to be trained was sampled by "
                f"weights of version {int(own_w[other[0]])}, and the step starts from version {weight_version}: sync "
                "the engine's weights before every rollout, and drop what it has cached"
            )
