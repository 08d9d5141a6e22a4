"""`PushSchedule`: when the weights of replicas are pushed into the slots, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from relibra.parallel.replicas.host_pool import HostPool
from relibra.parallel.replicas.prefetcher import WeightSource
from relibra.parallel.replicas.replica_slots import GroupState, Homes, ReplicaSlots
from relibra.parallel.rows.exchange import explain_peer_failure
from relibra.parallel.rows.rank_tables import Place, RankTables
from relibra.timeline import TimelineRecorder


class ReplicaSource:
    """The source of one execution: the pool, if there is one, in micro-batches without gradients; else the homes.

    current   pool that the micro-batch entered last takes weights from; None: homes send them
    """

    def __init__(self, pool: HostPool | None) -> None:
        """Take a pool, or None for homes in all micro-batches."""
        self.current: HostPool | None = None
        self._pool = pool
        self._is_fresh = False

    @property
    def wants_pool(self) -> bool:
        """Whether a micro-batch that is entered now takes weights from the pool."""
        return self._pool is not None and not torch.is_grad_enabled()

    def choose(self, slots: ReplicaSlots | None, place: Place) -> None:
        """Choose the source of a micro-batch; refresh a pool and invalidate slots that may be outdated. Collective.

        raises   EngineError when a peer is gone
        """
        self.current = self._pool if self.wants_pool else None
        if slots is not None and not (self.current is not None and self._is_fresh):
            slots.invalidate()
        if self.current is not None and not self._is_fresh:
            with explain_peer_failure("the check of the host pool", place, range(dist.get_world_size())):
                self.current.keep_current()
        self._is_fresh = self.current is not None  # after a pass with gradients, an optimizer step may follow

    def weights_may_change(self) -> None:
        """Compare the pool with the homes again before it is used: a pass with gradients ran outside the plan."""
        self._is_fresh = False


@dataclass(frozen=True, kw_only=True, eq=False)
class PushSchedule:
    """The pushes of one micro-batch. All ranks of the group start the same pushes in the same order.

    forward    before_forward      first layer with replicas
               before_layer        this layer, unless it was pushed early
               after_layer         next layer with replicas; after the last one, when weights come from a pool, the
                                   first layer with replicas of the next micro-batch
    backward   before_layer        this layer again, unless its weights are still in the slots
               after_gradients     previous layer with replicas: the gradients of this one have left the slots

    Early pushes need slots, which the first layer with replicas allocates when it runs, and weights that exist before
    their layer runs.

    num_slots       slots of the plan
    tables_L        by position of the layer
    homes_L         local parameters of each layer
    source          weights are fetched from it; None: homes send them
    homes_early     whether homes have their weights before their layer runs: FSDP does not shard them
    next_push       (position, tables) of the first push of the next micro-batch; None: there is none, or homes send
    recorder        of the execution; pushes and returns are recorded
    """

    state: GroupState
    num_slots: int
    tables_L: Sequence[RankTables]
    homes_L: Sequence[Homes]
    source: WeightSource | None
    homes_early: bool
    next_push: tuple[int, RankTables] | None
    recorder: TimelineRecorder

    def before_forward(self) -> None:
        """Start the first push, as the forward pass of the model begins."""
        self.after_layer(-1)

    def before_layer(self, position: int) -> None:
        """Start the push of a layer that is about to run forward or backward, unless it was started early."""
        self._start(position, self.tables_L[position])

    def after_layer(self, position: int) -> None:
        """Start the push of the next layer with replicas: the experts of this one are done with the slots."""
        if not self._can_start_early:
            return
        if (following := self._first_with_replicas(range(position + 1, len(self.tables_L)))) is not None:
            self.before_layer(following)
        elif self.next_push is not None:
            self._start(*self.next_push)

    def after_gradients(self, position: int) -> None:
        """Start the push of the previous layer with replicas: the gradients of this one's replicas are sent."""
        if self._can_start_early and (previous := self._first_with_replicas(reversed(range(position)))) is not None:
            self.before_layer(previous)

    def slots(self, position: int) -> ReplicaSlots:
        """Return the slots, allocated with the shapes of a layer if necessary."""
        return self.state.slots_for(self.num_slots, self.homes_L[position])

    @property
    def _can_start_early(self) -> bool:
        return self.state.slots is not None and (self.source is not None or self.homes_early)

    def _first_with_replicas(self, positions: Iterable[int]) -> int | None:
        return next((position for position in positions if self.tables_L[position].pushes), None)

    def _start(self, position: int, tables: RankTables) -> None:
        self.slots(position).start_push(tables, position, self.homes_L[position], self.source, self.recorder)
