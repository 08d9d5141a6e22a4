"""`ReplicaSource`: where the weights of replicas come from, the homes or a host pool."""

from __future__ import annotations

import torch
import torch.distributed as dist

from relibra.parallel.replicas.host_pool import HostPool
from relibra.parallel.replicas.replica_slots import ReplicaSlots
from relibra.parallel.rows.exchange import explain_peer_failure
from relibra.parallel.rows.rank_tables import Place


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
