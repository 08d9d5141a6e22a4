"""`ReplicaSlots`: slots on each rank for the weights of experts whose homes are on other ranks.

A rank has B slots, allocated once and used by every layer in turn. A push fills them before the experts of a layer run,
and again before its backward pass, because other layers use the slots in between: autograd saves the slot itself, so
the right weights have to be in it when the backward pass reads it. No slot is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from relibra.parallel.replicas.prefetcher import Prefetcher, WeightSource
from relibra.parallel.replicas.transfer import Transfer
from relibra.parallel.rows.exchange import all_gather
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
        self, tables: RankTables, position: int, homes: Homes, source: WeightSource | None, recorder: TimelineRecorder
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


class GroupState:
    """State that all layers of a model share on one rank, made by the first `execute_plan`.

    group        process group of the expert-parallel group: exchanges of rows, agreements
    device       of the model
    push_group   the same ranks, for replica weights and gradients, which travel beside the rows
    slots        None until a layer with replicas runs for the first time
    """

    def __init__(self, ep_mesh: DeviceMesh, device: torch.device) -> None:
        """Make the push group; collective over all ranks of the default process group."""
        self.group, self.device = ep_mesh.get_group(), device
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.push_group = _make_push_group(self.group, torch.device(ep_mesh.device_type))
        self.slots: ReplicaSlots | None = None

    def slots_for(self, num_slots: int, homes: Homes) -> ReplicaSlots:
        """Return the slots, allocated if there are none or another number of them.

        homes   returns the local parameters of a layer that is running: slots get their shapes and dtypes
        """
        if self.slots is None or self.slots.num_slots != num_slots:
            self.slots = ReplicaSlots(homes(), num_slots, self.push_group)
        return self.slots


def _make_push_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make a second group of the ranks of each expert-parallel group and return that of this rank; collective.

    `use_local_synchronization` would let members alone make their group, but torch names such groups after the number
    of groups that a rank has, and ranks with different numbers, as after making a `HostPool`, would deadlock.
    """
    ranks = dist.get_process_group_ranks(group)
    timeout = group._get_backend(device).options._timeout  # the default would be half an hour
    own_R = torch.tensor(ranks, device=device)
    assert dist.group.WORLD is not None, "a model on several ranks has process groups"
    gathered = all_gather(own_R, dist.group.WORLD, "making groups for pushes", Place(dist.get_rank(), -1, -1))
    all_groups = sorted({tuple(ranks_R.tolist()) for ranks_R in gathered})
    made = {members: dist.new_group(members, timeout=timeout) for members in all_groups}
    push_group = made[tuple(ranks)]
    assert dist.get_rank(push_group) == dist.get_rank(group), "both groups number their ranks alike"
    # NCCL needs all ranks in the first operation of a group, and not every rank takes part in every push.
    dist.all_reduce(torch.zeros(1, device=device), group=push_group)
    return push_group
