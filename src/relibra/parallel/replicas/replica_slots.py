"""`ReplicaSlots`: the slots of a rank in all layers, while a plan is executed or a model balances live.

Every slot is filled by a push and returns gradients. What differs is its lifetime: slots of a layer keep weights over
micro-batches and sum gradients until the replica's stay ends (`residency.py`); slots of all layers keep nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relibra.errors import EngineError
from relibra.parallel.group_state import GroupState
from relibra.parallel.replicas.residency import Residency, Settled
from relibra.parallel.replicas.slot_buffer import SlotBuffer
from relibra.planning.costs.expert_shape import GradientWire
from relibra.planning.traffic.rank_tables import Push

HomeParameters = Callable[[], dict[str, Tensor]]
"""Returns the local expert parameters `[E / R, ...]` of a layer, by name."""


class ReturnedGradient(NamedTuple):
    """A gradient, or a sum of gradients, that goes home.

    push   the push whose way it goes in reverse
    rows   `[...]` of one expert, by parameter; {} on ranks other than that of the slot
    """

    push: Push
    rows: dict[str, Tensor]


class ReplicaSlots:
    """The slots of one rank.

    state       of the group; keeps the buffer of all layers
    num_slots   B
    residency   what stays in slots of a layer; None: one buffer for all layers
    wire        type in which gradients travel
    frozen      names of weights that no optimizer changes; those in slots of layers stay valid over its steps
    keeps       frozen weights in slots of layers stay valid in the next execution too
    """

    def __init__(
        self,
        state: GroupState,
        num_slots: int,
        residency: Residency | None = None,
        wire: GradientWire = "model",
        *,
        frozen: frozenset[str] = frozenset(),
        keeps: bool = False,
    ) -> None:
        """Allocate nothing yet."""
        self.state, self.num_slots, self.residency, self._wire = state, num_slots, residency, wire
        self._frozen, self._keeps = frozen, keeps and residency is not None
        self._of_layers: dict[int, SlotBuffer] = state.kept if self._keeps else {}
        if any(buffer.num_slots != num_slots or buffer.frozen != frozen for buffer in self._of_layers.values()):
            self._of_layers.clear()
        self._open = True

    def buffer(self, layer: int, homes: HomeParameters | None = None) -> SlotBuffer | None:
        """Return the slots of a layer, allocated if necessary; None: their shapes and types are not known yet.

        homes   returns the parameters of the layer, which is running, so that they have the type of the forward pass
        """
        state = self.state
        if (like := state.shapes(homes)) is None:
            return None
        if self.residency is None:
            return state.shared_buffer(self.num_slots)
        if layer not in self._of_layers:
            self._of_layers[layer] = SlotBuffer(
                like, self.num_slots, state.num_ranks, of_layer=True, frozen=self._frozen
            )
        return self._of_layers[layer]

    def may_hold_gradients(self, micro_batch: int, layer: int) -> bool:
        """Return whether gradients of any rank may wait in slots of a layer, also where its replicas get no tokens."""
        return self.residency is not None and self.residency.has_replicas(micro_batch, layer)

    def add_gradients(
        self,
        micro_batch: int,
        layer: int,
        pushes: Sequence[Push],
        buffer: SlotBuffer,
        gradients: Mapping[str, Tensor | None],
    ) -> list[ReturnedGradient]:
        """Add gradients `[B, ...]` of the replicas of this rank to their sums; return what goes home, of all ranks.

        pushes      of all replicas that got tokens in this (layer, micro-batch)
        gradients   of trained parameters, by name; {}: this micro-batch adds none
        raises      EngineError after the end of the execution, where gradients would not go home
        """
        residency, rank = self.residency, self.state.rank
        if not self._open:
            raise EngineError(
                f"the backward pass of micro-batch {micro_batch} comes after execute_plan: gradients of resident "
                "replicas would not go home, so call backward() inside"
            )
        settled = Settled.at_once(pushes) if residency is None else residency.settle(micro_batch, layer, pushes)
        # A gradient that is the whole sum is sent as it is.
        alone = settled.fresh & {(push.replica, push.slot) for push in settled.after}
        before = {push.slot: buffer.sums(push.slot, clone=True) for push in settled.before if push.replica == rank}
        for push in pushes:
            if push.replica == rank and (rank, push.slot) not in alone:
                buffer.add(push.slot, gradients, fresh=(rank, push.slot) in settled.fresh)
        after = {
            push.slot: buffer.rows(gradients, push.slot) if (rank, push.slot) in alone else buffer.sums(push.slot)
            for push in settled.after
            if push.replica == rank
        }
        return [
            ReturnedGradient(push, rows[push.slot] if push.replica == rank else {})
            for ends, rows in ((settled.before, before), (settled.after, after))
            for push in ends
        ]

    def wire_type(self, weights: Tensor) -> torch.dtype:
        """Return the type in which gradients of these weights travel."""
        return weights.dtype if self._wire == "model" else torch.promote_types(weights.dtype, torch.float32)

    def begin_forward(self, micro_batch: int, *, training: bool) -> None:
        """Note that a forward pass begins: a new round over the micro-batches starts without weights."""
        if self.residency is not None and self.residency.begin_forward(micro_batch, training=training):
            self.forget_weights()

    def end_pass(self) -> None:
        """Wait for pushes under way; slots of all layers then keep nothing, because an optimizer step may follow."""
        self.state.wait_for_push()
        if self.residency is None:
            self.forget_weights()

    def forget_weights(self, *, frozen: bool = False) -> None:
        """Note that weights are outdated.

        A push under way is not dropped: the next one waits for it, so that neither gets the other's messages.

        frozen   also those that no optimizer changes: a push of them may have failed
        """
        for buffer in (self.state.buffer, *self._of_layers.values()):
            if buffer is not None:
                buffer.forget(frozen=frozen)

    def digest(self) -> int:
        """Return a number that is equal on ranks that made the same passes; 0 where nothing is kept."""
        if self.residency is None:
            return 0
        held = b"".join(buffer.held_bytes() for _, buffer in sorted(self._of_layers.items()))
        return zlib.crc32(held, self.residency.digest())

    @contextmanager
    def in_execution(self, model: nn.Module) -> Iterator[None]:
        """Forget weights before an optimizer of the model steps inside; free slots of layers at the end, or keep them.

        raises   EngineError out of the optimizer's `step`, or at the end, while gradients wait
        """
        residency = self.residency
        if residency is None:
            yield
            return

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                residency.refuse_waiting("the optimizer steps")
                self.forget_weights()

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
            residency.refuse_waiting("execute_plan ends")
        finally:
            handle.remove()
            self._open = False
            if not self._keeps:
                self._of_layers.clear()
