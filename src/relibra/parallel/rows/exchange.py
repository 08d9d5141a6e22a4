"""Exchange rows between ranks, with sizes that every rank knows beforehand; errors name place and peers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from relibra.errors import EngineError, LostPeerError
from relibra.planning.traffic.rank_tables import Place
from relibra.timeline import TimelineRecorder

_LOST_PEER = re.compile(r"gloo/(transport|rendezvous)|closed by peer|reset by peer|timed out waiting", re.IGNORECASE)
"""Messages of gloo about a lost or slow peer: it raises plain RuntimeError, also for wrong arguments; NCCL raises
`DistError`."""

Stage = Literal["dispatch", "combine", "dispatch in node", "combine in node"]
_BACK: dict[Stage, Stage] = {"dispatch": "combine", "dispatch in node": "combine in node"}
_BACK |= {back: there for there, back in _BACK.items()}


@contextmanager
def explain_peer_failure(what: str, place: Place, peers: Sequence[int]) -> Iterator[None]:
    """Raise an error with place and peers if a collective inside fails because a peer is gone or slow.

    what     operation, such as "the exchange of rows"
    peers    ranks of the expert-parallel group that have to take part
    raises   LostPeerError
    """
    try:
        yield
    except EngineError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
        lost_peer = isinstance(error, dist.DistError) or _LOST_PEER.search(reason)
        if not lost_peer or "out of memory" in str(error):
            raise
        others = sorted(set(peers) - {place.rank})
        raise LostPeerError(
            f"{place}: {what} with ranks {others} failed: {reason}. One of them died, hangs or runs "
            "another part of the step: look for the first error among those ranks, and resume from the last checkpoint"
        ) from error


def all_gather(own: Tensor, group: dist.ProcessGroup, what: str, place: Place) -> list[Tensor]:
    """Return the tensors of all ranks of a group, which have one shape; collective.

    what     operation, for the message when a peer is gone, such as "the agreement on the plan"
    raises   EngineError
    """
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with explain_peer_failure(what, place, range(len(gathered))):
        dist.all_gather(gathered, own, group=group)
    return gathered


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAll:
    """Sizes of one all-to-all on this rank, its group, and its place in the step.

    send_R, receive_R   rows to and from each rank
    all_stay            no rank of the group sends a row to another, as every rank knows: nothing is exchanged
    ranks_per_node      rank r is on node r // ranks_per_node; None: all are on one
    recorder            records each exchange with the bytes for other ranks and nodes; None: it is not recorded
    stage               recorded stage: "dispatch" to where rows are computed, "combine" on the way back; with "in node"
                        the hop inside nodes, which comes after the hop between them, and on the way back before it
    label               what is exchanged
    """

    send_R: list[int]
    receive_R: list[int]
    group: dist.ProcessGroup
    place: Place
    all_stay: bool = False
    ranks_per_node: int | None = None
    recorder: TimelineRecorder | None = None
    stage: Stage = "dispatch"
    label: str = "rows"

    @property
    def back(self) -> AllToAll:
        """Return the reverse exchange."""
        return replace(self, send_R=self.receive_R, receive_R=self.send_R, stage=_BACK[self.stage])

    def move(self, rows: Shaped[Tensor, "X ..."]) -> Shaped[Tensor, "Y ..."]:
        """Send rows, ordered by destination; return those that arrive, ordered by source. Not differentiable."""
        received = rows.new_empty((sum(self.receive_R), *rows.shape[1:]))
        with self._recorded(rows), explain_peer_failure("the exchange of rows", self.place, range(len(self.send_R))):
            dist.all_to_all_single(received, rows.contiguous(), self.receive_R, self.send_R, group=self.group)
        return received

    def _recorded(self, rows: Tensor) -> AbstractContextManager[None]:
        if self.recorder is None:
            return nullcontext()
        rank, total, row_bytes = self.place.rank, sum(self.send_R), rows[:1].nbytes
        per_node = self.ranks_per_node or len(self.send_R)
        first = rank - rank % per_node
        return self.recorder.record(
            self.stage,
            layer=self.place.layer_id,
            micro_batch=self.place.micro_batch,
            bytes=(total - self.send_R[rank]) * row_bytes,
            bytes_between_nodes=(total - sum(self.send_R[first : first + per_node])) * row_bytes,
            label=self.label,
        )


def exchange(rows: Shaped[Tensor, "X ..."], sizes: AllToAll) -> Shaped[Tensor, "Y ..."]:
    """Send rows, ordered by destination; return those that arrive, ordered by source. Differentiable.

    Rows that all stay on their ranks are returned as they are, without a collective.

    raises   EngineError when a peer is gone or the group's time-out has passed
    """
    return rows if sizes.all_stay else _Exchange.apply(rows, sizes)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: AllToAll) -> Tensor:
        ctx.sizes = sizes
        return sizes.move(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.sizes.back.move(gradients[0]), None
