"""`SlotBuffer`: the replica slots of a rank, of one layer or of all layers in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from relibra.planning.traffic.rank_tables import Push


class SlotBuffer:
    """Weights of experts whose homes are on other ranks, and notes of which experts the slots of every rank hold.

    Autograd saves the slots themselves, so the right weights have to be in them when a backward pass reads them. No
    slot is a parameter.

    weights    `[B, ...]` per parameter of the experts modules, by name
    of_layer   True: slots of one layer, whose weights stay; False: slots of all layers, filled anew for each that runs
    frozen     names of weights that no optimizer step outdates
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        num_slots: int,
        num_ranks: int,
        *,
        of_layer: bool,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """Allocate weights.

        like   tensors `[X, ...]` as the forward pass sees the weights
        """
        self.frozen = frozen
        self.weights = {name: tensor.new_zeros((num_slots, *tensor.shape[1:])) for name, tensor in like.items()}
        self.num_slots, self.of_layer = num_slots, of_layer
        self._sums: dict[str, Tensor] = {}
        self._held_RB = np.full((num_ranks, num_slots), -1)  # experts, whose weights are all up to date
        self._frozen_RB = self._held_RB.copy()  # experts whose frozen weights are there
        self._user: object = None

    def lacks(self, pushes: Sequence[Push]) -> bool:
        """Return whether a layer with these replicas may need a push; in slots of all layers any replica may."""
        return bool(self._missing(pushes)) if self.of_layer else bool(pushes)

    def claim(self, pushes: Sequence[Push], user: object) -> tuple[list[Push], set[int]]:
        """Return the pushes of weights that are missing, and note that they are on their way.

        pushes   of all replicas that a (layer, micro-batch) computes with
        user     identifies the pass; for another pass than the last, slots of all layers count as empty
        returns  the pushes, and the numbers of those among them that lack frozen weights too
        """
        if not self.of_layer and self._user is not user:
            self.forget(frozen=True)
            self._user = user
        missing = self._missing(pushes)
        whole = {n for n, push in enumerate(missing) if self._frozen_RB[push.replica, push.slot] != push.expert}
        for push in missing:
            self._held_RB[push.replica, push.slot] = self._frozen_RB[push.replica, push.slot] = push.expert
        return missing, whole

    def forget(self, *, frozen: bool) -> None:
        """Note that weights are outdated, with `frozen` those too that no optimizer step changes."""
        self._held_RB[:] = -1
        self._user = None
        if frozen:
            self._frozen_RB[:] = -1

    def held_bytes(self) -> bytes:
        """Return what the slots of all ranks hold, for ranks to compare."""
        return self._held_RB.tobytes() + self._frozen_RB.tobytes()

    def add(self, slot: int, gradients: Mapping[str, Tensor | None], *, fresh: bool) -> None:
        """Add gradients `[B, ...]` of one slot to its sums, in float32 or wider; `fresh` ones begin a sum."""
        for name, gradient in gradients.items():
            if name not in self._sums:
                weights = self.weights[name]
                self._sums[name] = torch.zeros_like(weights, dtype=torch.promote_types(weights.dtype, torch.float32))
            row = self._sums[name][slot]
            if fresh:
                row.zero_()
            if gradient is not None:
                row.add_(gradient[slot])

    def rows(self, gradients: Mapping[str, Tensor | None], slot: int) -> dict[str, Tensor]:
        """Return the gradients of one slot by parameter; zeros where nothing was computed."""
        return {
            name: torch.zeros_like(self.weights[name][slot]) if gradient is None else gradient[slot]
            for name, gradient in gradients.items()
        }

    def sums(self, slot: int, *, clone: bool = False) -> dict[str, Tensor]:
        """Return the sums of one slot by parameter; `clone`: what is added later does not change them."""
        return {name: sums[slot].clone() if clone else sums[slot] for name, sums in self._sums.items()}

    def _missing(self, pushes: Sequence[Push]) -> list[Push]:
        return [push for push in pushes if self._held_RB[push.replica, push.slot] != push.expert]
