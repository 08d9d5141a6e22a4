"""`PushSchedule`: when the weights of replicas are pushed into the slots, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relibra.parallel.replicas.replica_slots import HomeParameters, ReplicaSlots
from relibra.parallel.replicas.slot_buffer import SlotBuffer
from relibra.planning.traffic.rank_tables import RankTables
from relibra.timeline import TimelineRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class PushSchedule:
    """The pushes of one micro-batch. All ranks of the group start the same pushes in the same order.

    forward    before_forward    first layer that lacks weights
               before_layer      this layer, unless it was pushed early
               after_layer       next layer that lacks weights
    backward   before_layer      this layer again, unless its weights are still in the slots
               after_gradients   previous layer that lacks weights: the gradients of this one have left the slots

    Early pushes begin once a layer with replicas has run and shown the types of slots.

    tables_L        by position of the layer
    homes_L         functions that return the local parameters of each layer
    may_push_early  whether a push may start before its layer runs: homes are whole between passes, as FSDP does not
                    shard them over more ranks
    recorder        of the execution; pushes and returns are recorded
    """

    slots: ReplicaSlots
    tables_L: Sequence[RankTables]
    homes_L: Sequence[HomeParameters]
    may_push_early: bool
    recorder: TimelineRecorder

    def has_replicas(self, position: int) -> bool:
        """Return whether any rank has replicas of a layer that get tokens, or others with gradients that may wait."""
        tables = self.tables_L[position]
        return bool(tables.pushes) or self.slots.may_hold_gradients(tables.place.micro_batch, position)

    def before_forward(self) -> None:
        """Start the first push, as the forward pass of the model begins."""
        self.after_layer(-1)

    def before_layer(self, position: int, buffer: SlotBuffer) -> None:
        """Start the push of a layer that is about to run forward or backward, unless it was started early.

        buffer   that the layer computes with: a backward pass may come after another was allocated
        """
        tables = self.tables_L[position]
        missing, whole = buffer.claim(tables.pushes, tables)
        if missing:
            self.slots.state.start_push(tables.place, missing, whole, self.homes_L[position], buffer, self.recorder)

    def after_layer(self, position: int) -> None:
        """Start the push of the next layer that lacks weights: the experts of this one are done with the slots."""
        self._start_early(range(position + 1, len(self.tables_L)))

    def after_gradients(self, position: int) -> None:
        """Start the push of the previous layer that lacks weights: the gradients of this one's replicas are sent."""
        self._start_early(range(position)[::-1])

    def _start_early(self, positions: Iterable[int]) -> None:
        """Start the push of the first of these layers that lacks weights, if it may start early."""
        for position in positions if self.may_push_early else ():
            pushes = self.tables_L[position].pushes
            buffer = self.slots.buffer(position) if pushes else None
            if buffer is not None and buffer.lacks(pushes):
                self.before_layer(position, buffer)
                return
