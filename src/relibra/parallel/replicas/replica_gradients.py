"""`LayerReplicas`: replicas of one layer in the autograd graph: weights come from slots, gradients return home.

No replica is a parameter; its gradient is added to that of its home before FSDP, clipping or the optimizer see it
(fast sums; for canonical ones chunks send partial gradients home: `canonical.py`).
One layer, in the order of the forward pass; the backward pass runs the right column upwards, alike on every rank:

    forward                                         backward
    AddReplicaGradients      view the homes         wait for gradients of replicas, add them to those of the homes
    experts at home                                 experts at home
    ReturnReplicaGradients   wait for weights       send gradients of replicas home; the next push may start
    experts of replicas                             experts of replicas
    RefillSlots              view the outputs       push lacking weights again, wait for them

Autograd runs ready functions latest first, so gradients of replicas travel during the backward pass of the homes.
From shared slots, gradients go home in each micro-batch; from slots of one layer as one sum, where the stay ends
(`residency.py`), also if the replica has no tokens then or the micro-batch runs at home (`ReturnWaitingGradients`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relibra.parallel.replicas.push_schedule import PushSchedule
from relibra.parallel.replicas.replica_slots import ReplicaSlots
from relibra.parallel.replicas.slot_buffer import SlotBuffer
from relibra.parallel.replicas.transfer import Transfer
from relibra.planning.traffic.rank_tables import Place, Push
from relibra.timeline import TimelineRecorder


class GradientReturn:
    """Gradients of replicas of one (layer, micro-batch) on their way home."""

    def __init__(
        self, slots: ReplicaSlots, buffer: SlotBuffer, position: int, place: Place, recorder: TimelineRecorder
    ) -> None:
        """Send nothing yet.

        slots, buffer   of this rank, and those of them that the layer computes with
        position        of the layer
        """
        self._slots, self._buffer, self._position, self.place, self._recorder = slots, buffer, position, place, recorder
        self._transfer: Transfer | None = None
        self._arriving: dict[str, dict[int, Tensor]] = {}

    def send(self, pushes: Sequence[Push], gradients: Mapping[str, Tensor | None], trained: Sequence[str]) -> None:
        """Add gradients to their sums, and start to send complete sums home; collective.

        pushes      of the replicas of all ranks that computed; none where the plan is not followed
        gradients   `[B, ...]` of the slots of this rank, by parameter
        trained     parameters that need a gradient
        """
        of_trained = {name: gradients[name] for name in trained} if pushes else {}
        micro_batch = self.place.micro_batch
        returns = self._slots.add_gradients(micro_batch, self._position, pushes, self._buffer, of_trained)
        self._transfer = transfer = self.transfer([returned.push for returned in returns])
        for name in trained:
            like = self._buffer.weights[name]
            wire = self._slots.wire_type(like)
            arriving = {n: like.new_empty(like.shape[1:], dtype=wire) for n, _ in transfer.of_homes}
            transfer.start({n: returns[n].rows[name].to(wire) for n, _ in transfer.of_slots}, arriving)
            self._arriving[name] = arriving

    def transfer(self, pushes: Sequence[Push]) -> Transfer:
        """Return a transfer the reverse way of these pushes; nothing moves yet."""
        return Transfer(self.place, pushes, self._slots.state.push_group, self._recorder, homewards=True)

    def add_to(self, of_homes: dict[str, Tensor | None]) -> None:
        """Add the gradients that arrived to those of the homes, in place and in the order of their pushes."""
        if self._transfer is None:  # experts are frozen
            return
        self._transfer.finish()
        slot_of = {n: push.home_slot for n, push in self._transfer.of_homes}
        arriving, self._arriving, self._transfer = self._arriving, {}, None
        for name, rows in arriving.items():
            if not rows:
                continue
            of_home = of_homes[name]
            assert of_home is not None, "experts at home run on every rank, on a dummy row if there are no tokens"
            for slot, total in sum_at_homes(of_home, rows, slot_of).items():  # rounded once
                of_home[slot] = total


def sum_at_homes(of_home: Tensor, rows: Mapping[int, Tensor], slot_of: Mapping[int, int]) -> dict[int, Tensor]:
    """Return the sums of the gradients of homes `[E / R, ...]` and of those that arrived, by home slot, in float32.

    rows, slot_of   gradients `[...]` and their home slots, by number of the push
    """
    sums: dict[int, Tensor] = {}
    for n, row in rows.items():
        slot, wide = slot_of[n], torch.promote_types(row.dtype, torch.float32)
        sums[slot] = (sums[slot] if slot in sums else of_home[slot].to(wide)) + row.to(wide)
    return sums


class LayerReplicas:
    """The replicas of one (layer, micro-batch) in one forward pass and its backward pass.

    position   of the layer
    tables     of the layer; their pushes are those of all ranks
    buffer     slots that the layer computes with
    returns    gradients on their way home
    """

    def __init__(self, schedule: PushSchedule, position: int) -> None:
        """Allocate slots if there are none; nothing moves yet."""
        buffer = schedule.slots.buffer(position, schedule.homes_L[position])
        assert buffer is not None, "the layer is running"
        self.schedule, self.position, self.tables, self.buffer = schedule, position, schedule.tables_L[position], buffer
        self.returns = GradientReturn(schedule.slots, buffer, position, self.tables.place, schedule.recorder)

    def push(self) -> None:
        """Start to push the weights into the slots unless they are there; collective."""
        self.schedule.before_layer(self.position, self.buffer)

    def refill(self) -> None:
        """Push the weights into the slots unless they are there, and wait for them; collective."""
        self.push()
        self.wait_for_weights()

    def wait_for_weights(self) -> None:
        """Wait until the weights of this layer's replicas have arrived."""
        self.schedule.slots.state.wait_for_push(self.tables.place)

    def send_gradients(self, of_slots: Sequence[Tensor | None], trained: Sequence[str]) -> None:
        """Send the gradients of the slots home, by parameter, and start the push of the previous layer; collective."""
        self.returns.send(self.tables.pushes, dict(zip(self.buffer.weights, of_slots, strict=True)), trained)
        self.schedule.after_gradients(self.position)

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Return the weights `[1, ...]` in one slot of this rank."""
        return {name: weights[slot : slot + 1] for name, weights in self.buffer.weights.items()}


class AddReplicaGradients(torch.autograd.Function):
    """Homes as they are, and an anchor (0). Backward adds the gradients of replicas to those of the homes.

    The sender of gradients reads the anchor, so its backward pass runs before this one, which waits.
    """

    @staticmethod
    def forward(ctx: Any, returns: GradientReturn, names: list[str], *homes: Tensor) -> tuple[Tensor, ...]:
        """Return the anchor, and views of the homes; frozen ones are marked, so that they get no gradient."""
        ctx.set_materialize_grads(False)
        ctx.returns, ctx.names = returns, names
        views = [home.view_as(home) for home in homes]
        needs = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(view for view, needed in zip(views, needs, strict=True) if not needed))
        return (homes[0].new_zeros(()), *views)

    @staticmethod
    def backward(ctx: Any, _anchor: Tensor | None, *of_homes: Tensor | None) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of replicas and add them to the gradients of the homes."""
        ctx.returns.add_to(dict(zip(ctx.names, of_homes, strict=True)))
        return (None, None, *of_homes)


class ReturnReplicaGradients(torch.autograd.Function):
    """Weights of this rank's replicas; backward sends their gradients home and lets the next push start."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, trained: list[str], _anchor: Tensor) -> tuple[Tensor, ...]:
        """Wait for the weights and return the slots by parameter; frozen ones have no gradient."""
        ctx.set_materialize_grads(False)
        ctx.replicas, ctx.trained = replicas, trained
        replicas.wait_for_weights()
        slots = {name: weights.detach() for name, weights in replicas.buffer.weights.items()}
        ctx.mark_non_differentiable(*(slot for name, slot in slots.items() if name not in trained))
        return tuple(slots.values())

    @staticmethod
    def backward(ctx: Any, *of_slots: Tensor | None) -> tuple[None, None, None]:
        """Send the gradients of the slots home and start the push of the previous layer; collective."""
        ctx.replicas.send_gradients(of_slots, ctx.trained)
        return None, None, None


class RefillSlots(torch.autograd.Function):
    """Outputs of a layer as they are; backward pushes weights that left the slots again; collective."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, num_outputs: int, *outputs_and_slots: Tensor) -> tuple[Tensor, ...]:
        """Return views of the outputs; as this reads the slots, its backward pass runs before that of replicas."""
        ctx.replicas, ctx.num_slots = replicas, len(outputs_and_slots) - num_outputs
        return tuple(output.view_as(output) for output in outputs_and_slots[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Push the weights again and wait for them; collective."""
        ctx.replicas.refill()
        return (None, None, *of_outputs, *[None] * ctx.num_slots)


class ReturnWaitingGradients(torch.autograd.Function):
    """Output of a layer whose experts ran at home, as it is; backward sends complete sums of resident replicas home."""

    @staticmethod
    def forward(ctx: Any, returns: GradientReturn, trained: list[str], output: Tensor, _anchor: Tensor) -> Tensor:
        """Return a view of the output."""
        ctx.returns, ctx.trained = returns, trained
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Start to send complete sums home; collective."""
        ctx.returns.send([], {}, ctx.trained)
        return None, None, gradients[0], None
