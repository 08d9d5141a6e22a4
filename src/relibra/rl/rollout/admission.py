"""Which responses a step works on, and on which rank: unfinished ones first, fresh ones in the places left."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

import numpy as np

from relibra.errors import TraceError
from relibra.rl.rollout.response import Response


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Which responses have not begun, the same on all ranks.

    next_sample   no response from this id on has begun
    passed_over   ids below it that have not begun either, ascending: spares of ranks that had no place left for them;
                  they are the first to begin next
    """

    next_sample: int = 0
    passed_over: tuple[int, ...] = ()

    @property
    def started(self) -> int:
        """Responses that have begun since the start of the run."""
        return self.next_sample - len(self.passed_over)

    def ids(self) -> Iterator[int]:
        """Return sample ids in the order in which they begin, without an end."""
        return chain(self.passed_over, count(self.next_sample))

    def without(self, begun: Collection[int]) -> Fresh:
        """Return what has not begun after these responses have.

        >>> Fresh(next_sample=6, passed_over=(2,)).without([2, 7, 9])
        Fresh(next_sample=10, passed_over=(6, 8))
        """
        next_sample = max(self.next_sample, max(begun, default=-1) + 1)
        waiting, gone = chain(self.passed_over, range(self.next_sample, next_sample)), set(begun)
        passed_over = tuple(sample for sample in waiting if sample not in gone)
        assert len(passed_over) + self.started + len(begun) == next_sample, "a response begins twice"
        return Fresh(next_sample=next_sample, passed_over=passed_over)

    def spares(self, rank: int, num_ranks: int) -> Iterator[int]:
        """Return the ids that a rank may begin in the middle of a step, without an end: every rank has others."""
        return islice(self.ids(), rank, None, num_ranks)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a step begins with.

    rank_of   rank of every response under way, by sample id: those that go on first, then the fresh ones
    begun     sample ids that start with the step, ascending
    fresh     what has not begun then
    """

    rank_of: dict[int, int]
    begun: list[int]
    fresh: Fresh


def plan_admission(live: Sequence[tuple[int, int]], slots: int, fresh: Fresh, num_ranks: int) -> Admission:
    """Fill the places of a step: every live response goes on, and exactly as many start as places are left.

    The number of responses decoded per step is constant, so prompts never pile up and nothing waits long enough to go
    stale. Responses are dealt to the ranks in turn, longest-running first, then by id: counts differ by one at most,
    and the long prefixes that have to be fed again are spread.

    live    (sample id, windows so far) of the unfinished responses of all ranks, in any order
    slots   responses under way at once, over all ranks

    >>> plan_admission([(4, 1), (1, 2)], slots=4, fresh=Fresh(next_sample=6), num_ranks=2)
    Admission(rank_of={1: 0, 4: 1, 6: 0, 7: 1}, begun=[6, 7], fresh=Fresh(next_sample=8, passed_over=()))
    """
    assert len(live) <= slots, f"{len(live)} responses are under way, and a step has {slots} places"
    assert len({sample_id for sample_id, _ in live}) == len(live), "a response is live twice"
    waiting = set(fresh.passed_over)
    assert all(sample_id < fresh.next_sample and sample_id not in waiting for sample_id, _ in live), (
        "a response is live that never started"
    )
    begun = list(islice(fresh.ids(), slots - len(live)))
    going_on = [sample_id for sample_id, _ in sorted(live, key=lambda one: (-one[1], one[0]))]
    order = [*going_on, *begun]
    return Admission(
        rank_of={sample_id: place % num_ranks for place, sample_id in enumerate(order)},
        begun=begun,
        fresh=fresh.without(begun),
    )


def check_pool(*, started: int, finished: int, live: Sequence[tuple[int, int]], slots: int, max_windows: int) -> None:
    """Assert what holds after every step: no response is lost or lives too long.

    started, finished   responses since the start of the run, over all ranks
    live                (sample id, windows so far) of the unfinished ones, over all ranks
    max_windows         a response that had so many is finished
    """
    assert started == finished + len(live), (
        f"{started} responses started, {finished} finished and {len(live)} are under way: some were lost"
    )
    assert len(live) <= slots, f"{len(live)} responses are under way, and a step has {slots} places"
    for sample_id, windows in live:
        assert 0 < windows < max_windows, f"sample {sample_id} goes on after {windows} windows of {max_windows}"


def check_versions(responses: Sequence[Response], weight_version: int) -> None:
    """Make sure that every token of the windows to be trained was sampled by the weights that the step starts from.

    raises    TraceError naming the first other token: its probability ratio would mean something else
    """
    for response in responses:
        own_w = response.versions_r[response.length - response.window_length :]
        if (other := np.flatnonzero(own_w != weight_version)).size:
            place = response.length - response.window_length + int(other[0])
            raise TraceError(
                f"sample {response.sample_id}: response token {place} of the window to be trained was sampled by "
                f"weights of version {int(own_w[other[0]])}, and the step starts from version {weight_version}: sync "
                "the engine's weights before every rollout, and drop what it has cached"
            )
