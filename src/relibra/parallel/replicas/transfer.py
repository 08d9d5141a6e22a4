"""`Transfer`: point-to-point copies between homes and replica slots: weights to the slots, or gradients home."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor

from relibra.parallel.rows.exchange import explain_peer_failure
from relibra.parallel.rows.rank_tables import RankTables
from relibra.timeline import TimelineRecorder


class Transfer:
    """Copies of one (layer, micro-batch) to and from this rank; all ranks of the group start them in the same order.

    homewards   True: gradients, from slots to homes; False: weights, from homes to slots
    """

    def __init__(
        self, tables: RankTables, group: dist.ProcessGroup, recorder: TimelineRecorder, *, homewards: bool
    ) -> None:
        """Record the start time; nothing is sent yet."""
        self.tables = tables
        self._group, self._recorder = group, recorder
        self._stage = "return" if homewards else "push"
        self._works: list[dist.Work] = []
        self._sent: list[Tensor] = []  # kept alive until they are sent
        self._parts, self._bytes, self._begun = 0, 0, time.perf_counter()

    def start(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Start the copies of one parameter, by index of the push, in the order of pushes.

        outgoing   rows to send; those that are not contiguous are copied first
        incoming   rows to write, each contiguous
        """
        operations = []
        for n in sorted(outgoing.keys() | incoming.keys()):
            push = self.tables.pushes[n]
            tensor = outgoing[n].contiguous() if n in outgoing else incoming[n]
            operations.append(
                dist.P2POp(
                    dist.isend if n in outgoing else dist.irecv,
                    tensor,
                    group=self._group,
                    tag=self._parts * len(self.tables.pushes) + n,
                    group_peer=push.replica if push.home == self.tables.place.rank else push.home,
                )
            )
            if n in outgoing:
                self._sent.append(tensor)
                self._bytes += tensor.nbytes
        self._parts += 1
        if operations:
            with explain_peer_failure(f"the {self._stage} of replicas", self.tables.place, self._peers()):
                self._works += dist.batch_isend_irecv(operations)

    def finish(self) -> None:
        """Wait for the copies of this rank and record them.

        raises   EngineError when a peer is gone or the group's time-out has passed
        """
        if not self._works:
            return
        layer, micro_batch = self.tables.place.layer_id, self.tables.place.micro_batch
        with (
            self._recorder.record(f"wait {self._stage}", layer=layer, micro_batch=micro_batch),
            explain_peer_failure(f"the {self._stage} of replicas", self.tables.place, self._peers()),
        ):
            while self._works:
                self._works.pop().wait()
        seconds = time.perf_counter() - self._begun
        self._recorder.add(
            self._stage, start=self._begun, seconds=seconds, layer=layer, micro_batch=micro_batch, bytes=self._bytes
        )
        self._sent.clear()

    def _peers(self) -> list[int]:
        own = [push for push in self.tables.pushes if self.tables.place.rank in (push.home, push.replica)]
        return sorted({push.home for push in own} | {push.replica for push in own})
