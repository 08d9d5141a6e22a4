"""Exchange of rows between ranks with sizes that everyone knows beforehand, and what is said when it fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from relibra.errors import EngineError

_OF_A_PEER = re.compile(r"gloo|nccl|connection|timed out|timeout|socket|peer", re.IGNORECASE)
"""What is found in the messages of process groups about a peer that is gone, slow or elsewhere."""


class Place(NamedTuple):
    """Where in a step something happens, for messages; -1: it belongs to no layer or micro-batch."""

    rank: int
    layer_id: int
    micro_batch: int

    def __str__(self) -> str:
        """Name what applies."""
        layer = f", layer {self.layer_id}" * (self.layer_id >= 0)
        return f"rank {self.rank}{layer}" + f", micro-batch {self.micro_batch}" * (self.micro_batch >= 0)


@contextmanager
def waiting(what: str, place: Place, peers: Sequence[int]) -> Iterator[None]:
    """Turn a collective that fails inside, by a time-out or a dead peer, into an error that says who waited for whom.

    what     such as "the exchange of rows"
    peers    ranks of the expert-parallel group that have to take part
    raises   EngineError
    """
    try:
        yield
    except EngineError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not isinstance(error, dist.DistError) and not _OF_A_PEER.search(reason):
            raise
        others = sorted(set(peers) - {place.rank})
        raise EngineError(
            f"{place}: {what} with ranks {others} failed: {reason}. One of them died, hangs or is elsewhere in the "
            "step: look for the first error among those ranks, and resume from the last checkpoint"
        ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """One all-to-all of an expert-parallel group: sizes of this rank, and where it happens.

    send_R, receive_R   rows to and from each rank
    """

    send_R: list[int]
    receive_R: list[int]
    group: dist.ProcessGroup
    place: Place

    @property
    def back(self) -> Route:
        """The way back."""
        return Route(send_R=self.receive_R, receive_R=self.send_R, group=self.group, place=self.place)

    def move(self, rows: Shaped[Tensor, X * H]) -> Shaped[Tensor, Y * H]:
        """Send rows, ordered by destination; return those that arrive, ordered by source. Not differentiable."""
        received = rows.new_empty((sum(self.receive_R), *rows.shape[1:]))
        with waiting("the exchange of rows", self.place, range(len(self.send_R))):
            dist.all_to_all_single(received, rows.contiguous(), self.receive_R, self.send_R, group=self.group)
        return received


def exchange(rows: Shaped[Tensor, X * H], route: Route) -> Shaped[Tensor, Y * H]:
    """Send rows, ordered by destination; return those that arrive, ordered by source. Gradients take the way back.

    raises   EngineError when a peer is gone or the group's time-out has passed
    """
    return _Exchange.apply(rows, route)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.move(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.route.back.move(gradients[0]), None
