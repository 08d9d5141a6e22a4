"""`GroupState`: what all layers of a model share on one rank: process groups, prepared rows, slots of all layers."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from relibra.parallel.preparation import Preparation
from relibra.parallel.process_groups import make_same_ranks_group
from relibra.parallel.replicas.slot_buffer import SlotBuffer
from relibra.parallel.replicas.transfer import Transfer
from relibra.planning.traffic.rank_tables import Place, Push
from relibra.timeline import TimelineRecorder


class GroupState:
    """State that all layers of a model share on one rank, made by the first `execute_plan` or `balance_live`.

    group        process group of the expert-parallel group: exchanges of rows
    device       of the model
    push_group   the same ranks, for replica weights and gradients, which travel beside the rows
    preparation  of the rows of micro-batches, with a third group of the same ranks
    buffer       slots of all layers; None before they are used
    kept         slots of layers, by position, kept after an execution: with adapters, as frozen experts do not change
    live_passes  forward passes that were balanced live
    """

    def __init__(self, ep_mesh: DeviceMesh, device: torch.device) -> None:
        """Make the groups; collective over all ranks of the default process group."""
        self.group, self.device = ep_mesh.get_group(), device
        self.rank, self.num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.push_group = _make_push_group(self.group, torch.device(ep_mesh.device_type))
        host_group = make_same_ranks_group(self.group, torch.device(ep_mesh.device_type), backend="gloo")
        self.preparation = Preparation(host_group, device)
        self.buffer: SlotBuffer | None = None
        self.kept: dict[int, SlotBuffer] = {}
        self.live_passes = 0
        self._like: dict[str, Tensor] | None = None
        self._push: Transfer | None = None

    def shapes(self, homes: Callable[[], dict[str, Tensor]] | None = None) -> dict[str, Tensor] | None:
        """Return empty tensors with shapes and types of the expert weights; None before a layer with replicas has run.

        homes   returns the local parameters of a layer that is running: they have the type of the forward pass
        """
        if self._like is None and homes is not None:
            self._like = {name: home.detach().new_empty((0, *home.shape[1:])) for name, home in homes().items()}
        return self._like

    def shared_buffer(self, num_slots: int) -> SlotBuffer:
        """Return the slots of all layers, allocated anew if there were none or another number of them."""
        assert self._like is not None, "a layer with replicas has run"
        if self.buffer is None or self.buffer.num_slots != num_slots:
            self.wait_for_push()
            self.buffer = SlotBuffer(self._like, num_slots, self.num_ranks, of_layer=False)
        return self.buffer

    def start_push(
        self,
        place: Place,
        pushes: Sequence[Push],
        whole: Container[int],
        homes: Callable[[], dict[str, Tensor]],
        buffer: SlotBuffer,
        recorder: TimelineRecorder,
    ) -> None:
        """Start to fill slots for a (layer, micro-batch), after any push under way; collective.

        pushes   of all ranks, the same list on every rank
        whole    pushes, by number, that send frozen weights too
        homes    returns the local parameters of the layer
        """
        self.wait_for_push()
        self._push = transfer = Transfer(place, pushes, self.push_group, recorder, homewards=False)
        rows = homes() if transfer.of_homes else {}
        for name, weights in buffer.weights.items():
            sent = whole if name in buffer.frozen else range(len(pushes))
            # Cast as FSDP casts for the forward pass; `data` hides the write from autograd's version counters.
            transfer.start(
                outgoing={
                    n: rows[name][push.home_slot].to(weights.dtype) for n, push in transfer.of_homes if n in sent
                },
                incoming={n: weights.data[push.slot] for n, push in transfer.of_slots if n in sent},
            )

    def wait_for_push(self, place: Place | None = None) -> None:
        """Wait until weights of this rank's replicas have arrived, and those of its homes are sent.

        place   wait for a push of this (layer, micro-batch) alone; None: for any
        """
        if self._push is not None and place in (None, self._push.place):
            self._push.finish()
            self._push = None


def _make_push_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make a second group of the ranks of each expert-parallel group and return that of this rank; collective."""
    push_group = make_same_ranks_group(group, device)
    # NCCL needs all ranks in the first operation of a group, and not every rank takes part in every push.
    dist.all_reduce(torch.zeros(1, device=device), group=push_group)
    return push_group
