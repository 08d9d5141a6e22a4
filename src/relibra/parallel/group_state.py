"""`GroupState`: what all layers of a model share on one rank: process groups, prepared rows, shared slots."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from relibra.parallel.preparation import Preparation
from relibra.parallel.process_groups import make_same_ranks_group
from relibra.parallel.replicas.replica_slots import HomeParameters, ReplicaSlots


class GroupState:
    """State that all layers of a model share on one rank, made by the first `execute_plan` or `balance_live`.

    group        process group of the expert-parallel group: exchanges of rows
    device       of the model
    push_group   the same ranks, for replica weights and gradients, which travel beside the rows
    preparation  of the rows of micro-batches, with a third group of the same ranks
    slots        None until a layer with replicas runs for the first time; then other parts know shapes and dtypes too
    live_passes  forward passes that were balanced live
    """

    def __init__(self, ep_mesh: DeviceMesh, device: torch.device) -> None:
        """Make the groups; collective over all ranks of the default process group."""
        self.group, self.device = ep_mesh.get_group(), device
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.push_group = _make_push_group(self.group, torch.device(ep_mesh.device_type))
        host_group = make_same_ranks_group(self.group, torch.device(ep_mesh.device_type), backend="gloo")
        self.preparation = Preparation(host_group, device)
        self.slots: ReplicaSlots | None = None
        self.live_passes = 0

    def slots_for(self, num_shared: int, homes: HomeParameters) -> ReplicaSlots:
        """Return the shared slots, allocated if there are none or another number of them.

        homes   returns the local parameters of a layer that is running: slots get their shapes and dtypes
        """
        if self.slots is None or self.slots.num_shared != num_shared:
            if self.slots is not None:
                self.slots.wait()
            self.slots = ReplicaSlots(homes(), num_shared, self.push_group)
        return self.slots


def _make_push_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make a second group of the ranks of each expert-parallel group and return that of this rank; collective."""
    push_group = make_same_ranks_group(group, device)
    # NCCL needs all ranks in the first operation of a group, and not every rank takes part in every push.
    dist.all_reduce(torch.zeros(1, device=device), group=push_group)
    return push_group
