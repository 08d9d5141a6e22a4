"""`Transfer`: point-to-point copies between homes and replica slots: weights to the slots, or gradients home."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from relibra.parallel.rows.exchange import explain_peer_failure
from relibra.planning.traffic.rank_tables import Place, Push, from_homes_on, to_slots_on
from relibra.timeline import TimelineRecorder


class Transfer:
    """Copies of one (layer, micro-batch) to and from this rank; all ranks of the group start them in the same order.

    place        of this rank
    of_homes     pushes of experts at home here, with their numbers
    of_slots     pushes into slots of this rank, with their numbers
    """

    def __init__(
        self,
        place: Place,
        pushes: Sequence[Push],
        group: dist.ProcessGroup,
        recorder: TimelineRecorder,
        *,
        homewards: bool,
    ) -> None:
        """Record the start time; nothing is sent yet.

        pushes      of all ranks, the same list on every rank
        homewards   True: gradients, from slots to homes; False: weights, from homes to slots
        """
        self.place = place
        self.of_homes, self.of_slots = from_homes_on(place.rank, pushes), to_slots_on(place.rank, pushes)
        self._pushes, self._group, self._recorder = pushes, group, recorder
        self._stage = "return" if homewards else "push"
        self._works: list[dist.Work] = []
        self._kept: list[Tensor] = []  # alive until they are sent or have arrived
        self._parts, self._bytes, self._begun = 0, 0, time.perf_counter()

    def start(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Start the copies of one parameter, by number of the push, in the order of pushes.

        outgoing   rows to send; those that are not contiguous are copied first
        incoming   rows to write, each contiguous
        """
        operations = []
        for n in sorted(outgoing.keys() | incoming.keys()):
            push = self._pushes[n]
            tensor = outgoing[n].contiguous() if n in outgoing else incoming[n]
            operations.append(
                dist.P2POp(
                    dist.isend if n in outgoing else dist.irecv,
                    tensor,
                    group=self._group,
                    tag=self._parts * len(self._pushes) + n,
                    group_peer=push.replica if push.home == self.place.rank else push.home,
                )
            )
            self._kept.append(tensor)
            if n in outgoing:
                self._bytes += tensor.nbytes
        self._parts += 1
        if operations:
            with explain_peer_failure(f"the {self._stage} of replicas", self.place, self._peers()):
                self._works += dist.batch_isend_irecv(operations)

    def finish(self) -> None:
        """Wait for the copies of this rank and record them.

        raises   EngineError when a peer is gone or the group's time-out has passed
        """
        if not self._works:
            return
        layer, micro_batch = self.place.layer_id, self.place.micro_batch
        with (
            self._recorder.record(f"wait {self._stage}", layer=layer, micro_batch=micro_batch),
            explain_peer_failure(f"the {self._stage} of replicas", self.place, self._peers()),
        ):
            while self._works:
                self._works.pop().wait()
        seconds = time.perf_counter() - self._begun
        self._recorder.add(
            self._stage, start=self._begun, seconds=seconds, layer=layer, micro_batch=micro_batch, bytes=self._bytes
        )
        self._kept.clear()

    def _peers(self) -> list[int]:
        own = [push for push in self._pushes if self.place.rank in (push.home, push.replica)]
        return sorted({push.home for push in own} | {push.replica for push in own})
