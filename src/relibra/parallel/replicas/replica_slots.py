"""Replica slots: weights of hot experts on other ranks, for one (layer, micro-batch) at a time, and their gradients.

A rank has B slots, allocated once and used by every layer. Weights are pushed from the homes into them before the
experts run, and again before the backward pass, because other layers used the slots in between: what autograd saves of
a replica is the slot itself, and whoever runs backward has put the right weights into it by then. Nothing of a replica
is a parameter; its gradient is added into that of its home before anybody (FSDP, clipping, the optimizer) sees it.

One layer, in the order of the forward pass; the backward pass runs the right column upwards, on every rank alike:

    begin    start the push, unless it is on its way         hold     add the gradients that arrived to the homes'
    hold     tie the homes to the graph                      launch   send gradients home; the next push may start
    experts at home                                          experts at home
    launch   wait for the weights                            replicas
    replicas                                                 tie      wait for the weights, pushed again
    tie      the next layer's push may start

Autograd runs what is ready, the latest made first. So gradients of replicas are on their way before the backward pass
of the experts at home begins, and arrive behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from relibra.parallel.replicas.host_pool import HostPool, Prefetcher
from relibra.parallel.replicas.transfer import Transfer
from relibra.parallel.rows.rank_tables import RankTables
from relibra.timeline import TimelineRecorder

Homes = Callable[[], dict[str, Tensor]]
"""Returns the local expert parameters `[E / R, ...]` of a layer, by name."""

FETCH_TIMEOUT_S = 60.0
"""Copying a few experts from memory takes milliseconds; whatever takes this long hangs."""


class ReplicaSlots:
    """The slots of one rank, and how weights get into them.

    weights     `[B, ...]` per parameter of the experts modules, by name
    num_slots   B
    pool        where weights are fetched from while set; None: from the homes
    """

    pool: HostPool | None = None

    def __init__(
        self, like_homes: dict[str, Tensor], num_slots: int, group: dist.ProcessGroup, recorder: TimelineRecorder
    ) -> None:
        """Allocate the slots.

        like_homes   local parameters of any layer as its forward pass sees them; those of other layers are like them
        group        a process group for pushes alone, so that they can run beside the exchange of rows
        """
        self.weights = {name: home.new_zeros((num_slots, *home.shape[1:])) for name, home in like_homes.items()}
        self.num_slots, self.group, self.recorder = num_slots, group, recorder
        self._holds: RankTables | None = None
        self._transfer: Transfer | None = None
        self._prefetcher: Prefetcher | None = None
        self._fetching = False

    def begin(self, tables: RankTables, position: int, homes: Homes) -> None:
        """Start filling the slots for a (layer, micro-batch), unless its weights are here or on their way; collective.

        position   of the layer among those of the model
        """
        if not tables.pushes or (self._holds is not None and self._holds.place == tables.place):
            return
        self.wait()
        self._holds = tables
        if self.pool is not None:
            self._fetch(self.pool, tables, position)
            return
        rows = homes() if tables.pushes_from_here else {}
        self._transfer = Transfer(tables, self.group, self.recorder, homewards=False)
        for name, slots in self.weights.items():
            # Cast as FSDP casts for the forward pass, and written past autograd's version counters: see above.
            self._transfer.start(
                outgoing={n: rows[name][push.home_slot].to(slots.dtype) for n, push in tables.pushes_from_here},
                incoming={n: slots.data[push.slot] for n, push in tables.pushes_to_here},
            )

    def wait(self) -> None:
        """Return when the weights of this rank's replicas are here, and those of its homes are gone."""
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None
        if self._fetching:
            assert self._prefetcher is not None, "begin made it"
            assert self._holds is not None, "begin noted what it started"
            place = self._holds.place
            with self.recorder.record("wait push", layer=place.layer_id, micro_batch=place.micro_batch):
                self._prefetcher.wait(place, timeout=FETCH_TIMEOUT_S)
            self._fetching = False

    def forget(self) -> None:
        """Take no weights in the slots for current any more."""
        self.wait()
        self._holds = None

    def close(self) -> None:
        """End the thread that fetches from a pool: the step is over or has failed.

        Pushes under way stay so until the slots are used again: if they were forgotten, later ones could take their
        messages for their own.
        """
        self._holds, self.pool = None, None
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher, self._fetching = None, False

    def _fetch(self, pool: HostPool, tables: RankTables, position: int) -> None:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(pool)
        slots = [
            (position, push.expert, {name: slots.data[push.slot] for name, slots in self.weights.items()})
            for _, push in tables.pushes_to_here
        ]
        self._prefetcher.start(tables.place, slots)
        self._fetching = True


class LayerReplicas:
    """The replicas of one (layer, micro-batch) in one forward pass and its backward pass.

    fill          starts the push of their weights, unless it is done; collective
    next_before   called in the backward pass when the slots are free: starts the push of the layer before; collective
    """

    def __init__(
        self,
        slots: ReplicaSlots,
        tables: RankTables,
        fill: Callable[[], None],
        next_before: Callable[[], None],
    ) -> None:
        """Prepare; nothing moves yet."""
        self.slots, self.tables, self.fill, self.next_before = slots, tables, fill, next_before
        self._return: Transfer | None = None
        self._arriving: dict[str, dict[int, Tensor]] = {}

    def hold(self, homes: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (an anchor for `launch`, the homes); backward adds the gradients of replicas to those of homes."""
        anchor, *held = _Hold.apply(self, list(homes), *homes.values())
        return anchor, dict(zip(homes, held, strict=True))

    def launch(self, anchor: Tensor, needs_gradient: list[str]) -> dict[str, Tensor]:
        """Wait for the weights and return them; in the backward pass their gradients leave for the homes."""
        self.slots.wait()
        weights = _Launch.apply(self, needs_gradient, anchor)
        return dict(zip(self.slots.weights, weights, strict=True))

    def tie(self, output_YH: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Return the output as it is; its backward pass puts the weights into the slots again, also for idle ones."""
        return _Tie.apply(self, output_YH, *weights.values())

    def send_gradients(self, of_slots: dict[str, Tensor | None], needs_gradient: list[str]) -> None:
        """Start the way home of all gradients; collective."""
        tables = self.tables
        self._return = Transfer(tables, self.slots.group, self.slots.recorder, homewards=True)
        for name in needs_gradient:
            gradient, slots = of_slots[name], self.slots.weights[name]
            self._arriving[name] = {n: slots.new_empty(slots.shape[1:]) for n, _ in tables.pushes_from_here}
            self._return.start(
                outgoing={
                    n: slots.new_zeros(slots.shape[1:]) if gradient is None else gradient[push.slot]
                    for n, push in tables.pushes_to_here
                },
                incoming=self._arriving[name],
            )

    def add_gradients(self, of_homes: dict[str, Tensor | None]) -> None:
        """Add what arrived to the gradients of the homes, in place, in the order of pushes."""
        if self._return is None:  # frozen
            return
        self._return.finish()
        arriving, self._arriving, self._return = self._arriving, {}, None
        for name, rows in arriving.items():
            of_home, sums = of_homes[name], dict[int, Tensor]()
            for n, row in rows.items():
                assert of_home is not None, "experts at home run on every rank, if only on a dummy row"
                slot, wide = self.tables.pushes[n].home_slot, torch.promote_types(row.dtype, torch.float32)
                sums[slot] = (sums[slot] if slot in sums else of_home[slot].to(wide)) + row.to(wide)
            for slot, total in sums.items():  # rounded once
                assert of_home is not None, "experts at home run on every rank, if only on a dummy row"
                of_home[slot] = total


@contextmanager
def parameters_replaced(experts: nn.Module, by: dict[str, Tensor]) -> Iterator[None]:
    """Make the experts module compute with other weights `[n, ...]` than its parameters."""
    module: Any = experts
    own, num_experts = {name: module._parameters[name] for name in by}, module.num_experts
    module._parameters.update(by)
    module.num_experts = len(next(iter(by.values())))
    try:
        yield
    finally:
        module._parameters.update(own)
        module.num_experts = num_experts


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, names: list[str], *homes: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.replicas, ctx.names = replicas, names
        return (homes[0].new_zeros(()), *(home.view_as(home) for home in homes))

    @staticmethod
    def backward(ctx: Any, _anchor: Tensor | None, *of_homes: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.replicas.add_gradients(dict(zip(ctx.names, of_homes, strict=True)))
        return (None, None, *of_homes)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, needs_gradient: list[str], _anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.replicas, ctx.needs_gradient = replicas, needs_gradient
        return tuple(slots.detach() for slots in replicas.slots.weights.values())

    @staticmethod
    def backward(ctx: Any, *of_slots: Tensor | None) -> tuple[None, None, None]:
        replicas: LayerReplicas = ctx.replicas
        replicas.send_gradients(dict(zip(replicas.slots.weights, of_slots, strict=True)), ctx.needs_gradient)
        replicas.next_before()
        return None, None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, output: Tensor, *tied: Tensor) -> Tensor:
        ctx.replicas, ctx.num_tied = replicas, len(tied)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.replicas.fill()
        ctx.replicas.slots.wait()
        return (None, gradients[0], *[None] * ctx.num_tied)
