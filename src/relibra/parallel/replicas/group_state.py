"""`GroupState`: what an expert-parallel group keeps from one execution of a plan to the next."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from relibra.parallel.replicas.replica_slots import Homes, ReplicaSlots
from relibra.parallel.rows.exchange import all_gather
from relibra.parallel.rows.rank_tables import Place


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
