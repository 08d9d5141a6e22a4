"""Agreements: before ranks do something together they tell one another what it is, in a group of their own.

Every agreement is one all-gather of `WORDS` numbers, whatever it is about, so ranks at different points of a step meet
in it and all of them raise one error that says who is where. In the group of the layers, an agreement of one rank
would be taken for the rows or the weights of another, which ends processes without a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from relibra.errors import EngineError
from relibra.parallel.rows.exchange import all_gather
from relibra.planning.traffic.rank_tables import Place

WORDS = 12
"""Numbers of an agreement: point, micro-batch, gradients of the last forward pass, and nine of the point's own."""


class Point(IntEnum):
    """What a rank is about to do."""

    RELOCATE = 0
    PLAN = 1
    MICRO_BATCH = 2
    BACKWARD = 3
    END = 4
    LIVE = 5
    LIVE_END = 6


class LastForward(IntEnum):
    """Whether the last forward pass inside a micro-batch had gradients."""

    NONE = 0
    WITHOUT_GRADIENTS = 1
    WITH_GRADIENTS = 2


_IN_WORDS = {
    Point.RELOCATE: "moves experts (relocate)",
    Point.PLAN: "enters execute_plan",
    Point.MICRO_BATCH: "enters micro-batch {micro_batch}",
    Point.BACKWARD: "begins the backward pass of micro-batch {micro_batch}",
    Point.END: "leaves execute_plan",
    Point.LIVE: "enters balance_live",
    Point.LIVE_END: "leaves balance_live",
}


class Agreement:
    """The agreements of the ranks of one expert-parallel group.

    group           gloo group of the ranks, for agreements, and for counts and row lists of live balancing; numbers
                    travel from CPU to CPU
    last_forward    of this rank; told with every agreement, to explain a difference
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Start before any forward pass."""
        self.group, self.last_forward = group, LastForward.NONE
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def reach(self, point: Point, micro_batch: int = -1, own: Sequence[int] = ()) -> Int64[Tensor, "R X"]:
        """Return `own` of all ranks, [ranks, len(own)], at a point of the step; collective.

        own      what this rank tells, as many numbers on every rank
        raises   EngineError, on all ranks, when they are at different points; or when a peer is gone
        """
        words = [int(point), micro_batch, int(self.last_forward), *own]
        told = torch.zeros(WORDS, dtype=torch.int64)
        told[: len(words)] = torch.tensor(words, dtype=torch.int64)
        place = Place(self.rank, -1, micro_batch)
        gathered_RX = torch.stack(all_gather(told, self.group, "the agreement", place))
        if (gathered_RX[:, :2] != gathered_RX[0, :2]).any():
            raise EngineError(explain_points(gathered_RX[:, :3].tolist()))
        return gathered_RX[:, 3 : 3 + len(own)]


def explain_points(told_RX: Sequence[Sequence[int]]) -> str:
    """Return who is at which point of a step, of ranks that should be at the same one.

    told_RX   point, micro-batch and last forward pass of each rank
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, (point, micro_batch, last_forward) in enumerate(told_RX):
        text = _IN_WORDS[Point(point)].format(micro_batch=micro_batch)
        if last_forward == LastForward.WITHOUT_GRADIENTS and point != Point.RELOCATE:
            text += " after a forward pass without gradients"
        ranks_of.setdefault(text, []).append(rank)
    points = ", ".join(f"{text}: ranks {ranks}" for text, ranks in ranks_of.items())
    return (
        f"the ranks of the group are at different points of a step ({points}): move experts, enter micro-batches and "
        "run forward and backward passes alike on all ranks; a rank without samples passes None and runs its filler "
        "batch, backward too"
    )


def refuse_differences(place: Place, told_RX: Int64[Tensor, "R X"], names: Sequence[str]) -> None:
    """Raise EngineError where ranks differ in one of these numbers, each with a name."""
    for name, values_R in zip(names, told_RX.T.tolist(), strict=True):
        if len(set(values_R)) > 1:
            raise EngineError(
                f"{place}: ranks differ in {name}, by rank {values_R}: run the same passes with the same settings on "
                "all ranks, a filler batch on ranks without samples"
            )


def digest_word(content: bytes) -> int:
    """Return a number for ranks to compare in place of a content."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], signed=True)
