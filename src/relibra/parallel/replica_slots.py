"""Replica slots: weights of hot experts on other ranks, for one (micro-batch, layer), and their gradients back home.

A replica is never a parameter. Its weights are the output of an autograd function whose input are the home parameters,
so the gradients of all replicas end up in those of the home before anybody (FSDP, clipping, the optimizer) sees them.

Every rank has to run its collectives in the same order, in the backward pass too. Autograd runs what is ready, the
latest made first. So `push_weights` comes first in the layer: its backward then runs after those of the experts and of
the dispatch, and before that of everything in front of the layer. `tie` makes sure that it does run on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from relibra.parallel.rank_tables import RankTables


@dataclass(frozen=True, eq=False)
class ReplicaWeights:
    """Weights in the spare slots of this rank; to be read after `wait`.

    by_name   `[B, ...]` for each parameter of the experts module; `[0, ...]` where no replica comes to this rank
    """

    by_name: dict[str, Tensor]
    _transfers: list[dist.Work]

    def wait(self) -> None:
        """Return when the weights of this rank's replicas are here, and those of its homes are gone."""
        _finish(self._transfers)


def push_weights(tables: RankTables, home: dict[str, Tensor], group: dist.ProcessGroup) -> ReplicaWeights:
    """Start all pushes of a (micro-batch, layer); the backward pass adds gradients to the homes, by replica rank.

    home    local parameters `[E / R, ...]` of the experts module, by name; the same names in the same order everywhere
    group   a process group for pushes alone, so that they can run beside the exchange of rows
    """
    transfers: list[dist.Work] = []
    slots = _Push.apply(tables, group, transfers, *home.values())
    return ReplicaWeights(dict(zip(home, slots, strict=True)), transfers)


def tie(output_YH: Float[Tensor, "Y H"], replicas: ReplicaWeights) -> Float[Tensor, "Y H"]:
    """Return the output as it is; on ranks whose slots stay unused, its backward pass still returns the gradients."""
    return _Tie.apply(output_YH, *replicas.by_name.values())


@contextmanager
def replicas_in(experts: nn.Module, replicas: ReplicaWeights) -> Iterator[None]:
    """Make the experts module compute with the spare slots instead of its own parameters."""
    module: Any = experts
    own, num_experts = {name: module._parameters[name] for name in replicas.by_name}, module.num_experts
    module._parameters.update(replicas.by_name)
    module.num_experts = len(next(iter(replicas.by_name.values())))
    try:
        yield
    finally:
        module._parameters.update(own)
        module.num_experts = num_experts


class _Push(torch.autograd.Function):
    """Home parameters into slots; gradients of the slots back into those of the homes."""

    @staticmethod
    def forward(
        ctx: Any, tables: RankTables, group: dist.ProcessGroup, transfers: list[dist.Work], *home: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tables, ctx.group, ctx.device = tables, group, home[0].device
        ctx.like_home = [torch.empty_like(weight, device="meta") for weight in home]
        held = tables.num_spare if tables.pushes_to_here else 0
        slots = tuple(weight.new_empty((held, *weight.shape[1:])) for weight in home)
        for which, (weight, slot) in enumerate(zip(home, slots, strict=True)):
            outgoing = {n: weight[push.home_slot] for n, push in tables.pushes_from_here}
            incoming = {n: slot[push.slot] for n, push in tables.pushes_to_here}
            transfers += _start(tables, which, group, outgoing | incoming, homewards=False)
        return slots

    @staticmethod
    def backward(ctx: Any, *of_slots: Tensor | None) -> tuple[Tensor | None, ...]:
        tables: RankTables = ctx.tables
        of_homes: list[Tensor | None] = [None] * len(of_slots)
        transfers, incoming = [], {}
        for which, (like, of_slot) in enumerate(zip(ctx.like_home, of_slots, strict=True)):
            if not ctx.needs_input_grad[_WEIGHTS_FROM + which]:  # frozen, on every rank alike
                continue
            zeros = partial(torch.zeros, like.shape[1:], dtype=like.dtype, device=ctx.device)
            arriving = {n: zeros() for n, _ in tables.pushes_from_here}
            leaving = {n: zeros() if of_slot is None else of_slot[push.slot] for n, push in tables.pushes_to_here}
            transfers += _start(tables, which, ctx.group, arriving | leaving, homewards=True)
            incoming[which] = arriving
        _finish(transfers)
        for which, arrived in incoming.items():
            if arrived:
                of_homes[which] = of_home = torch.zeros_like(ctx.like_home[which], device=ctx.device)
                for n, gradient in arrived.items():  # in the order of pushes: by replica rank
                    of_home[tables.pushes[n].home_slot] += gradient
        return (None,) * _WEIGHTS_FROM + tuple(of_homes)


_WEIGHTS_FROM = 3
"""Arguments of `_Push` before its weights."""


class _Tie(torch.autograd.Function):
    """Identity that makes whatever it is tied to part of the backward pass, without a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tied: Tensor) -> Tensor:
        ctx.num_tied = len(tied)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (gradients[0], *[None] * ctx.num_tied)


def _start(
    tables: RankTables, which: int, group: dist.ProcessGroup, tensor_of: dict[int, Tensor], *, homewards: bool
) -> list[dist.Work]:
    """Start this rank's share of the pushes of parameter number `which`, in the order of pushes."""
    operations = []
    for n in sorted(tensor_of):
        push = tables.pushes[n]
        outwards = (push.home == tables.rank) != homewards
        operations.append(
            dist.P2POp(
                dist.isend if outwards else dist.irecv,
                tensor_of[n].contiguous() if outwards else tensor_of[n],
                group=group,
                tag=which * len(tables.pushes) + n,
                group_peer=push.replica if push.home == tables.rank else push.home,
            )
        )
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(transfers: list[dist.Work]) -> None:
    while transfers:
        transfers.pop().wait()
