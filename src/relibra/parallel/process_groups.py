"""Further process groups of the ranks of an expert-parallel group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from relibra.parallel.rows.exchange import all_gather
from relibra.planning.traffic.rank_tables import Place


def make_same_ranks_group(
    group: dist.ProcessGroup, device: torch.device, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Make another group of the ranks of each expert-parallel group; return that of this rank; collective over all.

    `use_local_synchronization` would let members alone make their group, but torch names such groups after the number
    of groups that a rank has, and ranks with different numbers would deadlock.

    group     of this rank; the new one has its time-out
    device    on which the ranks exchange who is in which group
    backend   None: that of the default group
    """
    ranks = dist.get_process_group_ranks(group)
    timeout = group._get_backend(device).options._timeout  # the default would be half an hour
    own_R = torch.tensor(ranks, device=device)
    assert dist.group.WORLD is not None, "a model on several ranks has process groups"
    gathered = all_gather(own_R, dist.group.WORLD, "making process groups", Place(dist.get_rank(), -1, -1))
    all_groups = sorted({tuple(ranks_R.tolist()) for ranks_R in gathered})
    made = {members: _make_group(members, timeout, backend) for members in all_groups}
    same = made[tuple(ranks)]
    assert dist.get_rank(same) == dist.get_rank(group), "both groups number their ranks alike"
    return same


def _make_group(members: tuple[int, ...], timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    """Make one group; collective over all ranks.

    While a gloo group is made the default group is not bound to a device: else torch makes ranks outside of the new
    group wait for a split of the default communicator (pytorch/pytorch#145376).
    """
    default = dist.group.WORLD
    assert default is not None, "a model on several ranks has process groups"
    bound = default.bound_device_id
    if backend == "gloo":
        default.bound_device_id = None
    try:
        return dist.new_group(members, timeout=timeout, backend=backend)
    finally:
        default.bound_device_id = bound
