"""`PushSchedule`: when the weights of replicas are pushed into the slots, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int16
from numpy import ndarray

from relibra.parallel.group_state import GroupState
from relibra.parallel.replicas.replica_slots import HomeParameters, ReplicaSlots, SlotRange
from relibra.parallel.replicas.resident_slots import Residents
from relibra.planning.traffic.rank_tables import RankTables
from relibra.timeline import TimelineRecorder


@dataclass(frozen=True, kw_only=True, eq=False)
class PushSchedule:
    """The pushes of one micro-batch. All ranks of the group start the same pushes in the same order.

    forward    before_forward      first layer that lacks weights
               before_layer        this layer, unless it was pushed early
               after_layer         next layer that lacks weights
    backward   before_layer        this layer again, unless its weights are still in the slots
               after_gradients     previous layer that lacks weights: the gradients of this one have left the slots

    Weights in shared slots are lacking as soon as another layer has used the slots; those in resident slots when an
    expert comes, or, with micro-batches in flight, when the slot was given to another expert before the backward pass.
    Early pushes need slots, which the first layer with replicas allocates when it runs (only then its weights have the
    type of the forward pass; with another number of slots than before again), and weights that exist before their layer
    runs.

    num_shared      shared slots of the plan
    residents       resident slots; None: the plan has none
    tables_L        by position of the layer
    homes_L         functions that return the local parameters of each layer
    may_push_early  whether a push may start before its layer runs: homes have the weights then, as FSDP does not shard
                    them over more ranks
    recorder        of the execution; pushes and returns are recorded
    """

    state: GroupState
    num_shared: int
    residents: Residents | None
    tables_L: Sequence[RankTables]
    homes_L: Sequence[HomeParameters]
    may_push_early: bool
    recorder: TimelineRecorder

    @property
    def num_resident(self) -> int:
        """Return the number of slots that each layer has for itself; they come before the shared ones."""
        return 0 if self.residents is None else self.residents.num_slots

    @cached_property
    def used_LRA(self) -> Int16[ndarray, "L R A"]:
        """Return the experts that get tokens in resident slots, -1 elsewhere."""
        if self.residents is None:
            return np.zeros((len(self.tables_L), self.state.num_ranks, 0), dtype=np.int16)
        return self.residents.used_LRA(self.tables_L, self.state.num_ranks)

    def has_replicas(self, position: int) -> bool:
        """Return whether any rank has replicas of a layer; in resident slots idle ones count too."""
        resident, micro_batch = self.residents, self.tables_L[position].place.micro_batch
        has_some = bool(self.tables_L[position].pushes)
        return has_some or (resident is not None and resident.residency.has_replicas(micro_batch, position))

    def before_forward(self) -> None:
        """Start the first push, as the forward pass of the model begins."""
        self.after_layer(-1)

    def before_layer(self, position: int, slots: ReplicaSlots) -> None:
        """Start the push of a layer that is about to run forward or backward, unless it was started early.

        slots   those that the layer computes with: a backward pass may come after others were allocated
        """
        tables, A = self.tables_L[position], self.num_resident
        missing_RA = self._missing_LRA[position]
        pushes = [push for push in tables.pushes if push.slot < A and missing_RA[push.replica, push.slot]]
        if self._shared_L[position] and slots.shared_by is not tables:
            slots.shared_by = tables
            pushes += [push for push in tables.pushes if push.slot >= A]
        if pushes:
            if self.residents is not None:
                self.residents.residency.fill(position, self.used_LRA[position])
            ranges = self.slot_ranges(position, slots)
            slots.start_push(tables.place, pushes, self.homes_L[position], ranges, self.recorder)

    def after_layer(self, position: int) -> None:
        """Start the push of the next layer that lacks weights: the experts of this one are done with the slots."""
        self._start_early(range(position + 1, len(self.tables_L)))

    def after_gradients(self, position: int) -> None:
        """Start the push of the previous layer that lacks weights: the gradients of this one's replicas are sent."""
        self._start_early(range(position)[::-1])

    def slots(self, position: int) -> ReplicaSlots:
        """Return the slots, allocated with the shapes of a layer if necessary."""
        return self.state.slots_for(self.num_shared, self.homes_L[position])

    def slot_ranges(self, position: int, slots: ReplicaSlots) -> tuple[SlotRange, SlotRange]:
        """Return the resident slots of a layer and the shared ones; either may be none."""
        shared, A = slots.weights, self.num_resident
        resident = {name: weights[:0] for name, weights in shared.items()}
        if self.residents is not None:
            resident = self.residents.weights(position, shared)
        return SlotRange(slice(0, A), resident), SlotRange(slice(A, A + self.num_shared), shared)

    def _start_early(self, positions: range) -> None:
        """Start the push of the first of these layers that lacks weights, if there are slots and it may start early."""
        slots = self.state.slots
        if slots is not None and slots.num_shared == self.num_shared and self.may_push_early:
            lacking_L = self._shared_L | self._missing_LRA.any(axis=(1, 2))
            first = next((position for position in positions if lacking_L[position]), None)
            if first is not None:
                self.before_layer(first, slots)

    @property
    def _missing_LRA(self) -> Bool[ndarray, "L R A"]:
        if self.residents is None:
            return np.zeros(self.used_LRA.shape, dtype=bool)
        return self.residents.residency.missing(self.used_LRA)

    @cached_property
    def _shared_L(self) -> Bool[ndarray, " L"]:
        """Return in which layers shared slots of any rank are used."""
        return np.array([any(push.slot >= self.num_resident for push in tables.pushes) for tables in self.tables_L])
