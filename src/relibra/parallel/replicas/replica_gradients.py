"""`LayerReplicas`: replicas of one layer in the autograd graph: weights come from slots, gradients return home.

No replica is a parameter; its gradient is added to that of its home before FSDP, clipping or the optimizer see it.
One layer, in the order of the forward pass; the backward pass runs the right column upwards, alike on every rank:

    forward                                         backward
    AddReplicaGradients      view the homes         wait for gradients of replicas, add them to those of the homes
    experts at home                                 experts at home
    ReturnReplicaGradients   wait for weights       send gradients of replicas home; the next push may start
    experts of replicas                             experts of replicas
    RefillSlots              view the output        push the weights again, wait for them

Autograd runs ready functions latest first. So gradients of replicas are on their way before the backward pass of the
experts at home begins, and travel during it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relibra.parallel.replicas.push_schedule import PushSchedule
from relibra.parallel.replicas.transfer import Transfer


class LayerReplicas:
    """The replicas of one (layer, micro-batch) in one forward pass and its backward pass.

    position   of the layer
    tables     of the layer, with pushes of any ranks
    slots      of this rank
    """

    def __init__(self, schedule: PushSchedule, position: int) -> None:
        """Allocate slots if there are none; nothing moves yet."""
        self.schedule, self.position = schedule, position
        self.tables, self.slots = schedule.tables_L[position], schedule.slots(position)
        self._return: Transfer | None = None
        self._arriving: dict[str, dict[int, Tensor]] = {}

    def refill(self) -> dict[str, Tensor]:
        """Push the weights into the slots unless they are there, wait for them and return them; collective."""
        self.schedule.before_layer(self.position)
        return self.wait_for_weights()

    def wait_for_weights(self) -> dict[str, Tensor]:
        """Return the slots `[B, ...]` by parameter, when the weights have arrived."""
        self.slots.wait()
        return self.slots.weights

    def start_return(self) -> Transfer:
        """Return a transfer of gradients to the homes; nothing moves yet."""
        return Transfer(self.tables, self.slots.push_group, self.schedule.recorder, homewards=True)

    def send_gradients(self, of_slots: dict[str, Tensor | None], trained: list[str]) -> None:
        """Start to send the gradients of replicas home, zeros for idle ones; collective.

        of_slots   gradient of each parameter `[B, ...]`
        trained    parameters that need a gradient
        """
        tables = self.tables
        self._return = self.start_return()
        for name in trained:
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
        """Add the gradients that arrived to those of the homes, in place and in the order of pushes."""
        if self._return is None:  # experts are frozen
            return
        self._return.finish()
        arriving, self._arriving, self._return = self._arriving, {}, None
        for name, rows in arriving.items():
            if not rows:
                continue
            of_home, sums = of_homes[name], dict[int, Tensor]()
            assert of_home is not None, "experts at home run on every rank, without tokens on a dummy row"
            for n, row in rows.items():
                slot, wide = self.tables.pushes[n].home_slot, torch.promote_types(row.dtype, torch.float32)
                sums[slot] = (sums[slot] if slot in sums else of_home[slot].to(wide)) + row.to(wide)
            for slot, total in sums.items():  # rounded once
                of_home[slot] = total


class AddReplicaGradients(torch.autograd.Function):
    """Identity of the homes, with an anchor (0): the backward of its reader, `ReturnReplicaGradients`, runs first."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, names: list[str], *homes: Tensor) -> tuple[Tensor, ...]:
        """Return the anchor, and views of the homes."""
        ctx.set_materialize_grads(False)
        ctx.replicas, ctx.names = replicas, names
        return (homes[0].new_zeros(()), *(home.view_as(home) for home in homes))

    @staticmethod
    def backward(ctx: Any, _anchor: Tensor | None, *of_homes: Tensor | None) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of replicas and add them to the gradients of the homes."""
        ctx.replicas.add_gradients(dict(zip(ctx.names, of_homes, strict=True)))
        return (None, None, *of_homes)


class ReturnReplicaGradients(torch.autograd.Function):
    """Weights of this rank's replicas; backward sends their gradients home and lets the next push start."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, trained: list[str], _anchor: Tensor) -> tuple[Tensor, ...]:
        """Wait for the weights and return the slots."""
        ctx.set_materialize_grads(False)
        ctx.replicas, ctx.trained = replicas, trained
        return tuple(slots.detach() for slots in replicas.wait_for_weights().values())

    @staticmethod
    def backward(ctx: Any, *of_slots: Tensor | None) -> tuple[None, None, None]:
        """Send the gradients of the slots home and start the push of the previous layer; collective."""
        replicas: LayerReplicas = ctx.replicas
        replicas.send_gradients(dict(zip(replicas.slots.weights, of_slots, strict=True)), ctx.trained)
        replicas.schedule.after_gradients(replicas.position)
        return None, None, None


class RefillSlots(torch.autograd.Function):
    """Identity of a layer's output; backward pushes the weights of its replicas again, also of idle ones."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, output: Tensor, *slots: Tensor) -> Tensor:
        """Return a view of the output."""
        ctx.replicas, ctx.num_slots = replicas, len(slots)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Push the weights again and wait for them; collective."""
        ctx.replicas.refill()
        return (None, gradients[0], *[None] * ctx.num_slots)
