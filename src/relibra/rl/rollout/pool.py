"""Which responses a step works on, and on which rank: unfinished ones first, fresh ones in the places left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relibra.errors import TraceError
from relibra.rl.rollout.response import Response


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a step works on.

    rank_of       rank of every response under way, by sample id: those that go on first, then the fresh ones
    fresh         sample ids that start in this step, ascending
    next_sample   the id that the next fresh response will have
    """

    rank_of: dict[int, int]
    fresh: list[int]
    next_sample: int


def plan_admission(live: Sequence[tuple[int, int]], slots: int, next_sample: int, num_ranks: int) -> Admission:
    """Fill the places of a step: every live response goes on, and exactly as many start as places are left.

    The number of responses decoded per step is constant, so prompts never pile up and nothing waits long enough to go
    stale. Responses are dealt to the ranks in turn, longest-running first, then by id: counts differ by one at most,
    and the long prefixes that have to be fed again are spread.

    live          (sample id, windows so far) of the unfinished responses of all ranks, in any order
    slots         responses under way in a step, over all ranks
    next_sample   id of the first response that has not started

    >>> plan_admission([(4, 1), (1, 2)], slots=4, next_sample=6, num_ranks=2)
    Admission(rank_of={1: 0, 4: 1, 6: 0, 7: 1}, fresh=[6, 7], next_sample=8)
    """
    assert len(live) <= slots, f"{len(live)} responses are under way, and a step has {slots} places"
    assert len({sample_id for sample_id, _ in live}) == len(live), "a response is live twice"
    assert all(sample_id < next_sample for sample_id, _ in live), "a response is live that never started"
    fresh = list(range(next_sample, next_sample + slots - len(live)))
    going_on = [sample_id for sample_id, _ in sorted(live, key=lambda one: (-one[1], one[0]))]
    order = [*going_on, *fresh]
    return Admission(
        rank_of={sample_id: place % num_ranks for place, sample_id in enumerate(order)},
        fresh=fresh,
        next_sample=next_sample + len(fresh),
    )


def check_pool(*, started: int, finished: int, live: Sequence[tuple[int, int]], slots: int, max_windows: int) -> None:
    """Assert what holds after every step: no response is lost or lives too long.

    started, finished   responses since the start of the run, over all ranks
    live                (sample id, windows so far) of the unfinished ones, over all ranks
    max_windows         rollout.max_response / rollout.window: a response that had so many is finished
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
