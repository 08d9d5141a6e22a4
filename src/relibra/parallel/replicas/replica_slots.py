"""`ReplicaSlots`: slots on each rank for the weights of experts whose homes are on other ranks.

Of the B slots of a rank, the first A may be resident: every layer has A of its own (`resident_slots.py`). The others
are allocated once and used by every layer in turn. A push fills them before the experts of a layer run, and again
before its backward pass, because other layers use the slots in between: autograd saves the slot itself, so the right
weights have to be in it when the backward pass reads it. No slot is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from relibra.parallel.replicas.gradient_buffers import GradientBuffers
from relibra.parallel.replicas.transfer import Transfer
from relibra.planning.traffic.rank_tables import Place, Push, RankTables
from relibra.timeline import TimelineRecorder

HomeParameters = Callable[[], dict[str, Tensor]]
"""Returns the local expert parameters `[E / R, ...]` of a layer, by name."""


class SlotRange(NamedTuple):
    """Consecutive slots of a rank (of 0..B-1), and their weights `[X, ...]` by parameter."""

    slots: slice
    weights: dict[str, Tensor]


class ReplicaSlots:
    """The shared slots of one rank, filled for one (layer, micro-batch) at a time, and the push that is under way.

    weights           `[X, ...]` per parameter of the experts modules, by name
    num_shared        X
    shared_by         tables of the layer whose weights are in the shared slots or on their way; None: outdated ones.
                      Two plans, or a plan and live balancing, may have tables of one place: these are told apart
    push_group        process group of pushes and returns
    gradient_buffers  memory for gradients on their way home
    """

    def __init__(self, like_homes: dict[str, Tensor], num_shared: int, push_group: dist.ProcessGroup) -> None:
        """Allocate the slots.

        like_homes   local parameters of any layer as its forward pass sees them; all layers have the same shapes
        """
        self.weights = {name: home.new_zeros((num_shared, *home.shape[1:])) for name, home in like_homes.items()}
        self.num_shared, self.push_group = num_shared, push_group
        self.gradient_buffers = GradientBuffers(self.weights)
        self.shared_by: RankTables | None = None
        self._filling: Transfer | None = None

    def start_push(
        self,
        place: Place,
        pushes: Sequence[Push],
        homes: HomeParameters,
        ranges: Sequence[SlotRange],
        recorder: TimelineRecorder,
    ) -> None:
        """Start to fill slots for a (layer, micro-batch), after any push under way; collective.

        pushes   of all ranks, the same list on every rank
        ranges   slots of this rank, shared or not
        """
        self.wait()
        self._filling = transfer = Transfer(place, pushes, self.push_group, recorder, homewards=False)
        rows = homes() if transfer.of_homes else {}
        for name, like in self.weights.items():
            # Cast as FSDP casts for the forward pass; `data` hides the write from autograd's version counters.
            slots = {slot: row for one in ranges for slot, row in _numbered(one, one.weights[name].data)}
            transfer.start(
                outgoing={n: rows[name][push.home_slot].to(like.dtype) for n, push in transfer.of_homes},
                incoming={n: slots[push.slot] for n, push in transfer.of_slots},
            )

    def wait(self, place: Place | None = None) -> None:
        """Return when weights of this rank's replicas have arrived, and those of its homes are sent.

        place   wait for a push of this (layer, micro-batch) alone; None: for any
        """
        if self._filling is not None and place in (None, self._filling.place):
            self._filling.finish()
            self._filling = None

    def invalidate(self) -> None:
        """Mark the weights in the shared slots as outdated, after any push under way."""
        self.wait()
        self.shared_by = None

    def forget(self) -> None:
        """Mark the weights in the shared slots as outdated where the step is over or has failed.

        The next use of the slots finishes pushes under way: later pushes could match the messages of dropped ones.
        """
        self.shared_by = None
        self.gradient_buffers.clear()


def _numbered(one: SlotRange, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each slot of a range with its row."""
    yield from zip(range(one.slots.start, one.slots.stop), rows, strict=True)
