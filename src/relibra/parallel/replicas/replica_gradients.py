"""`LayerReplicas`: replicas of one layer in the autograd graph: weights come from slots, gradients return home.

No replica is a parameter; its gradient is added to that of its home before FSDP, clipping or the optimizer see it.
One layer, in the order of the forward pass; the backward pass runs the right column upwards, alike on every rank:

    forward                                         backward
    AddReplicaGradients      view the homes         wait for gradients of replicas, add them to those of the homes
    experts at home                                 experts at home
    ReturnReplicaGradients   wait for weights       send gradients of replicas home; the next push may start
    experts of replicas                             experts of replicas
    RefillSlots              view the outputs       push lacking weights again, wait for them

Autograd runs ready functions latest first. So gradients of replicas are on their way before the backward pass of the
experts at home begins, and travel during it.

Of replicas in shared slots the gradients of this micro-batch go home. Those of resident replicas are summed over
micro-batches first; in the last one of a stay (`residency.py`) the sum goes home, also where the replica is idle, or
where the micro-batch does not follow the plan (`ReturnWaitingGradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relibra.parallel.replicas.push_schedule import PushSchedule
from relibra.parallel.replicas.replica_slots import ReplicaSlots
from relibra.parallel.replicas.resident_slots import Residents, ReturnedGradient
from relibra.parallel.replicas.transfer import Transfer
from relibra.planning.traffic.rank_tables import Place, Push
from relibra.timeline import TimelineRecorder


class GradientReturn:
    """Gradients of replicas of one (layer, micro-batch) on their way home.

    slots   of this rank; they say shapes and dtypes, and have buffers for what arrives
    """

    def __init__(self, place: Place, slots: ReplicaSlots, recorder: TimelineRecorder) -> None:
        """Send nothing yet."""
        self.place, self.slots, self.recorder = place, slots, recorder
        self._transfer: Transfer | None = None
        self._arriving: dict[str, dict[int, Tensor]] = {}

    def send(self, returns: Sequence[ReturnedGradient], trained: Sequence[str], *, num_sums: int) -> None:
        """Start to send gradients home; collective.

        returns   of all ranks, the same pushes on every rank
        trained   parameters that need a gradient
        num_sums  number of returns at the end of the list that are sums, in single precision
        """
        pushes = [one.push for one in returns]
        self._transfer = transfer = self.transfer(pushes)
        for name in trained:
            narrow = self.slots.weights[name].dtype
            wide = torch.promote_types(narrow, torch.float32)
            self._arriving[name] = {
                n: self.slots.gradient_buffers.take(name, wide if n >= len(pushes) - num_sums else narrow)
                for n, _ in transfer.of_homes
            }
            transfer.start({n: returns[n].rows[name] for n, _ in transfer.of_slots}, self._arriving[name])

    def transfer(self, pushes: Sequence[Push]) -> Transfer:
        """Return a transfer the reverse way of these pushes; nothing moves yet."""
        return Transfer(self.place, pushes, self.slots.push_group, self.recorder, homewards=True)

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
            of_home, sums = of_homes[name], dict[int, Tensor]()
            assert of_home is not None, "experts at home run on every rank, without tokens on a dummy row"
            for n, row in rows.items():
                slot, wide = slot_of[n], torch.promote_types(row.dtype, torch.float32)
                sums[slot] = (sums[slot] if slot in sums else of_home[slot].to(wide)) + row.to(wide)
            for slot, total in sums.items():  # rounded once
                of_home[slot] = total
            self.slots.gradient_buffers.give_back(name, rows.values())


class LayerReplicas:
    """The replicas of one (layer, micro-batch) in one forward pass and its backward pass.

    position           of the layer
    tables             of the layer, with pushes of any ranks
    slots              of this rank
    resident, shared   slots of this layer alone, and those of all layers, with their weights
    returns            gradients on their way home
    """

    def __init__(self, schedule: PushSchedule, position: int) -> None:
        """Allocate slots if there are none; nothing moves yet."""
        self.schedule, self.position = schedule, position
        self.tables, self.slots = schedule.tables_L[position], schedule.slots(position)
        self.resident, self.shared = schedule.slot_ranges(position, self.slots)
        self.returns = GradientReturn(self.tables.place, self.slots, schedule.recorder)

    def push(self) -> None:
        """Start to push the weights into the slots unless they are there; collective."""
        self.schedule.before_layer(self.position, self.slots)

    def refill(self) -> None:
        """Push the weights into the slots unless they are there, and wait for them; collective."""
        self.push()
        self.wait_for_weights()

    def wait_for_weights(self) -> None:
        """Return when the weights of this layer's replicas have arrived."""
        self.slots.wait(self.tables.place)

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Return the weights `[1, ...]` in one slot of this rank (0..B-1)."""
        A = self.resident.slots.stop
        one, first = (self.resident, slot) if slot < A else (self.shared, slot - A)
        return {name: weights[first : first + 1] for name, weights in one.weights.items()}

    def send_gradients(self, of_slots: Sequence[Tensor | None], trained: Sequence[str]) -> None:
        """Start to send gradients home; idle replicas in shared slots send zeros. Collective.

        of_slots   gradients by parameter: those of the resident slots, then those of the shared ones
        trained    parameters that need a gradient
        """
        names, place, A = list(self.shared.weights), self.tables.place, self.resident.slots.stop
        of_resident = dict(zip(names, of_slots, strict=False))
        of_shared = dict(zip(names, of_slots[len(names) :], strict=True))
        returns, sums = [], list[ReturnedGradient]()
        for push in self.tables.pushes:
            if push.slot >= A:
                own = trained if push.replica == place.rank else ()
                returns.append(
                    ReturnedGradient(push, {name: self._row(name, of_shared[name], push.slot - A) for name in own})
                )
        if (residents := self.schedule.residents) is not None:
            gradients = {name: of_resident[name] for name in trained}
            used_RA = self.schedule.used_LRA[self.position]
            sums = residents.add_gradients(place.micro_batch, self.position, used_RA, gradients)
        self.returns.send(returns + sums, trained, num_sums=len(sums))

    def _row(self, name: str, gradient: Tensor | None, slot: int) -> Tensor:
        """Return the gradient of one shared slot; zeros where nothing was computed."""
        return self.slots.gradient_buffers.zeros(name) if gradient is None else gradient[slot]


class WaitingGradients:
    """Gradient sums that resident replicas hold where a (layer, micro-batch) does not follow the plan.

    returns   gradients on their way home
    """

    def __init__(self, returns: GradientReturn, residents: Residents, position: int, num_ranks: int) -> None:
        """Send nothing yet."""
        self.returns = returns
        self._residents, self._position, self._num_ranks = residents, position, num_ranks

    def send(self, trained: Sequence[str]) -> None:
        """Start to send home what is complete with this micro-batch; collective."""
        none_RA = np.full((self._num_ranks, self._residents.num_slots), -1, dtype=np.int16)
        sums = self._residents.add_gradients(self.returns.place.micro_batch, self._position, none_RA, {})
        self.returns.send(sums, trained, num_sums=len(sums))


class AddReplicaGradients(torch.autograd.Function):
    """Homes as they are, and an anchor (0). Backward adds the gradients of replicas to those of the homes.

    What reads the anchor sends gradients in its backward pass; by reading it, its backward pass runs before this one.
    """

    @staticmethod
    def forward(ctx: Any, returns: GradientReturn, names: list[str], *homes: Tensor) -> tuple[Tensor, ...]:
        """Return the anchor, and views of the homes."""
        ctx.set_materialize_grads(False)
        ctx.returns, ctx.names = returns, names
        return (homes[0].new_zeros(()), *(home.view_as(home) for home in homes))

    @staticmethod
    def backward(ctx: Any, _anchor: Tensor | None, *of_homes: Tensor | None) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of replicas and add them to the gradients of the homes."""
        ctx.returns.add_to(dict(zip(ctx.names, of_homes, strict=True)))
        return (None, None, *of_homes)


class ReturnReplicaGradients(torch.autograd.Function):
    """Weights of this rank's replicas; backward sends their gradients home and lets the next push start."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, trained: list[str], _anchor: Tensor) -> tuple[Tensor, ...]:
        """Wait for the weights and return the slots by parameter: resident ones, then shared ones."""
        ctx.set_materialize_grads(False)
        ctx.replicas, ctx.trained = replicas, trained
        replicas.wait_for_weights()
        both = (*replicas.resident.weights.values(), *replicas.shared.weights.values())
        return tuple(weights.detach() for weights in both)

    @staticmethod
    def backward(ctx: Any, *of_slots: Tensor | None) -> tuple[None, None, None]:
        """Send the gradients of the slots home and start the push of the previous layer; collective."""
        replicas: LayerReplicas = ctx.replicas
        replicas.send_gradients(of_slots, ctx.trained)
        replicas.schedule.after_gradients(replicas.position)
        return None, None, None


class RefillSlots(torch.autograd.Function):
    """Outputs of a layer as they are; backward pushes weights that left the slots again, those of idle ones too."""

    @staticmethod
    def forward(ctx: Any, replicas: LayerReplicas, num_outputs: int, *outputs_and_slots: Tensor) -> tuple[Tensor, ...]:
        """Return views of the outputs; by the slots behind them this runs before the backward pass of replicas."""
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
    def forward(ctx: Any, waiting: WaitingGradients, trained: list[str], output: Tensor, _anchor: Tensor) -> Tensor:
        """Return a view of the output."""
        ctx.waiting, ctx.trained = waiting, trained
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Start to send complete sums home; collective."""
        ctx.waiting.send(ctx.trained)
        return None, None, gradients[0], None
