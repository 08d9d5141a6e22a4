"""`Residents`: the resident slots of one rank in all layers, while a plan is executed.

A layer has A slots of its own. Weights stay in them over micro-batches; gradients are summed beside them, in single
precision, until they go home. `residency.py` decides what is where; this file holds the tensors. A layer gets its
memory when it first needs it, and all of it is free when the execution ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int16
from numpy import ndarray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relibra.errors import EngineError
from relibra.parallel.replicas.residency import Residency
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Push, RankTables


class ReturnedGradient(NamedTuple):
    """A gradient, or a sum of gradients, that goes home.

    push   whose way it goes in reverse
    rows   `[...]` of one expert, by parameter; {} on ranks other than that of the slot
    """

    push: Push
    rows: dict[str, Tensor]


class _LayerSlots(NamedTuple):
    """Slots `[A, ...]` of one layer, by parameter; `sums` only of those that have had a gradient."""

    weights: dict[str, Tensor]
    sums: dict[str, Tensor]


class Residents:
    """The resident slots of one rank.

    num_slots   A
    residency   what the slots of all ranks hold
    """

    def __init__(self, plan: StepPlan, rank: int) -> None:
        """Allocate nothing yet.

        plan   with its replicas where `keep_slots` puts them
        """
        self.num_slots, self.residency = plan.slots, Residency(plan)
        self._rank, self._layers, self._open = rank, dict[int, _LayerSlots](), True

    def used_LRA(self, tables_L: Sequence[RankTables], num_ranks: int) -> Int16[ndarray, "L R A"]:
        """Return the experts that get tokens in resident slots, -1 elsewhere."""
        used_LRA = np.full((len(tables_L), num_ranks, self.num_slots), -1, dtype=np.int16)
        for layer, tables in enumerate(tables_L):
            for push in tables.pushes:
                if push.slot < self.num_slots:
                    used_LRA[layer, push.replica, push.slot] = push.expert
        return used_LRA

    def weights(self, layer: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the slots of a layer `[A, ...]` by parameter.

        like   tensors `[X, ...]` as the forward pass sees them
        """
        if layer not in self._layers:
            empty = {name: tensor.new_zeros((self.num_slots, *tensor.shape[1:])) for name, tensor in like.items()}
            self._layers[layer] = _LayerSlots(empty, {})
        return self._layers[layer].weights

    def add_gradients(
        self, micro_batch: int, layer: int, used_RA: Int16[ndarray, "R A"], gradients: dict[str, Tensor | None]
    ) -> list[ReturnedGradient]:
        """Add gradients `[A, ...]` of used slots to their sums; return what goes home now, of all ranks.

        gradients   of trained parameters, by name; {}: this micro-batch adds none
        raises      EngineError after the end of the execution
        """
        if not self._open:
            raise EngineError(
                f"the backward pass of micro-batch {micro_batch} comes after execute_plan: gradients of resident "
                "replicas would not go home, so call backward() inside"
            )
        settled = self.residency.settle(micro_batch, layer, used_RA)
        returns = [ReturnedGradient(push, self._rows(layer, push, clone=True)) for push in settled.before]
        for slot in np.flatnonzero(used_RA[self._rank] >= 0).tolist():
            for name, gradient in gradients.items():
                self._add(layer, name, slot, gradient, fresh=(self._rank, slot) in settled.fresh)
        return returns + [ReturnedGradient(push, self._rows(layer, push)) for push in settled.after]

    @contextmanager
    def watching_steps_of(self, model: nn.Module) -> Iterator[None]:
        """Forget weights before an optimizer of the model steps inside; free all slots at the end.

        raises   EngineError out of the optimizer's `step`, or at the end, while gradients wait
        """

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                self.residency.refuse_waiting("the optimizer steps")
                self.residency.forget_weights()

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
            self.residency.refuse_waiting("execute_plan ends")
        finally:
            handle.remove()
            self._open = False
            self._layers.clear()

    def _add(self, layer: int, name: str, slot: int, gradient: Tensor | None, *, fresh: bool) -> None:
        slots = self._layers[layer]
        if name not in slots.sums:
            weights = slots.weights[name]
            slots.sums[name] = torch.zeros_like(weights, dtype=torch.promote_types(weights.dtype, torch.float32))
        row = slots.sums[name][slot]
        if fresh:
            row.zero_()
        if gradient is not None:
            row.add_(gradient[slot])

    def _rows(self, layer: int, push: Push, *, clone: bool = False) -> dict[str, Tensor]:
        if push.replica != self._rank:
            return {}
        rows = {name: sums[push.slot] for name, sums in self._layers[layer].sums.items()}
        return {name: row.clone() for name, row in rows.items()} if clone else rows
