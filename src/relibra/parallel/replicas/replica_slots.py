"""`ReplicaSlots`: slots on each rank for the weights of experts whose homes are on other ranks.

A rank has B slots, allocated once and used by every layer in turn. A push fills them before the experts of a layer run,
and again before its backward pass, because other layers use the slots in between: autograd saves the slot itself, so
the right weights have to be in it when the backward pass reads it. No slot is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from relibra.parallel.replicas.prefetcher import Prefetcher, WeightSource
from relibra.parallel.replicas.transfer import Transfer
from relibra.parallel.rows.rank_tables import Place, RankTables
from relibra.timeline import TimelineRecorder

Homes = Callable[[], dict[str, Tensor]]
"""Returns the local expert parameters `[E / R, ...]` of a layer, by name."""

FETCH_TIMEOUT_S = 60.0
"""Copying a few experts from host memory takes milliseconds."""


class ReplicaSlots:
    """The slots of one rank, filled for one (layer, micro-batch) at a time.

    weights      `[B, ...]` per parameter of the experts modules, by name
    num_slots    B
    push_group   process group of pushes and returns
    """

    def __init__(self, like_homes: dict[str, Tensor], num_slots: int, push_group: dist.ProcessGroup) -> None:
        """Allocate the slots.

        like_homes   local parameters of any layer as its forward pass sees them; all layers have the same shapes
        """
        self.weights = {name: home.new_zeros((num_slots, *home.shape[1:])) for name, home in like_homes.items()}
        self.num_slots, self.push_group = num_slots, push_group
        self._current: RankTables | None = None  # whose weights are in the slots or on their way
        self._filling: Transfer | _Fetch | None = None
        self._prefetcher: Prefetcher | None = None

    def start_push(
        self,
        tables: RankTables,
        position: int,
        homes: Homes,
        source: WeightSource | None,
        recorder: TimelineRecorder,
    ) -> None:
        """Start to fill the slots for a (layer, micro-batch), unless its weights are here or on their way; collective.

        position   of the layer among those of the model
        source     where weights are fetched from; None: from the homes
        """
        if not tables.pushes or (self._current is not None and self._current.place == tables.place):
            return
        self.wait()
        self._current = tables
        if source is not None:
            self._filling = self._fetch(source, tables, position, recorder)
            return
        rows = homes() if tables.pushes_from_here else {}
        self._filling = transfer = Transfer(tables, self.push_group, recorder, homewards=False)
        for name, slots in self.weights.items():
            # Cast as FSDP casts for the forward pass; `data` hides the write from autograd's version counters.
            transfer.start(
                outgoing={n: rows[name][push.home_slot].to(slots.dtype) for n, push in tables.pushes_from_here},
                incoming={n: slots.data[push.slot] for n, push in tables.pushes_to_here},
            )

    def wait(self) -> None:
        """Return when the weights of this rank's replicas have arrived, and those of its homes are sent."""
        if self._filling is not None:
            self._filling.finish()
            self._filling = None

    def invalidate(self) -> None:
        """Mark the weights in the slots as outdated, after any push under way."""
        self.wait()
        self._current = None

    def close(self) -> None:
        """End the thread that fetches weights: the step is over or has failed.

        The next use of the slots finishes pushes under way: later pushes could match the messages of dropped ones.
        """
        self._current = None
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        if isinstance(self._filling, _Fetch):
            self._filling = None

    def _fetch(self, source: WeightSource, tables: RankTables, position: int, recorder: TimelineRecorder) -> _Fetch:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(source)
        copies = [
            (position, push.expert, {name: slots.data[push.slot] for name, slots in self.weights.items()})
            for _, push in tables.pushes_to_here
        ]
        self._prefetcher.start(tables.place, copies)
        return _Fetch(self._prefetcher, tables.place, recorder)


class _Fetch(NamedTuple):
    """Copies out of a weight source, under way."""

    prefetcher: Prefetcher
    place: Place
    recorder: TimelineRecorder

    def finish(self) -> None:
        """Wait for the copies."""
        with self.recorder.record("wait push", layer=self.place.layer_id, micro_batch=self.place.micro_batch):
            self.prefetcher.wait(self.place, timeout=FETCH_TIMEOUT_S)
