"""`ActivationMemory`: what layers may keep in the memory of a rank, by a dry run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.activation_choice import ALL, RECOMPUTE, ActivationChoice
from relibra.planning.plan import StepPlan
from relibra.rl.memory.estimate import GIB
from relibra.routing.demand import ScheduledDemand
from relibra.simulation import ModelShape
from relibra.simulation.kept_activations import choose_activations, fits, rows_of_layers, seconds_saved


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Bytes of an update on a rank.

    token_bytes_L        that a decoder layer saves for its backward pass beside its input and outside of its routed
                         experts, per token of the rank
    token_slot_bytes_L   that its experts save, per token-slot that the rank computes
    loss_bytes           most that the rank holds outside of layers, where every layer is recomputed
    layer_bytes          most that it holds while layers run backward, with `token_slots` in each
    room_bytes           that may be filled, by replica slots too; None: no limit is known
    """

    token_bytes_L: Sequence[float]
    token_slot_bytes_L: Sequence[float]
    loss_bytes: float
    layer_bytes: float
    token_slots: int
    room_bytes: float | None

    def beside_replica_slots(self, slot_gib: float | None) -> ActivationMemory:
        """Return the same with `slot_gib` less room, kept for replica slots; None: no room is kept for them."""
        return self if self.room_bytes is None else replace(self, room_bytes=self.room_bytes - GIB * (slot_gib or 0.0))

    def choose(self, plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, model: ModelShape) -> ActivationChoice:
        """Return what layers keep in a step; `demand` is under the schedule of the plan."""
        tokens_MR, token_slots_MLR = rows_of_layers(plan, demand, model, len(self.token_bytes_L))
        return choose_activations(
            np.outer(self.token_bytes_L, [0, 1, 1]),
            np.outer(self.token_slot_bytes_L, [0, 0, 1]),
            seconds_saved(plan, demand, cluster, model, len(self.token_bytes_L)),
            tokens_MR=tokens_MR,
            token_slots_MLR=token_slots_MLR,
            free=self._free(token_slots_MLR),
        )

    def kept_LMR(self, option_L: Sequence[str], plan: StepPlan, demand: ScheduledDemand, model: ModelShape) -> ndarray:
        """Return the bytes that layers keep on each rank in each micro-batch, `[L, M, R]`."""
        tokens_MR, token_slots_MLR = rows_of_layers(plan, demand, model, len(self.token_bytes_L))
        named_L = np.array(option_L)
        of_token_L, of_slot_L = self.token_bytes_L * (named_L != RECOMPUTE), self.token_slot_bytes_L * (named_L == ALL)
        kept_LMR: ndarray = of_token_L[:, None, None] * tokens_MR
        return kept_LMR + of_slot_L[:, None, None] * token_slots_MLR.swapaxes(0, 1)

    def fits(self, option_L: Sequence[str], plan: StepPlan, demand: ScheduledDemand, model: ModelShape) -> bool:
        """Return whether a choice fits into a step that it was not made for."""
        free_LMR = self._free(rows_of_layers(plan, demand, model, len(self.token_bytes_L))[1])
        return fits(self.kept_LMR(option_L, plan, demand, model), free_LMR)

    def _free(self, token_slots_MLR: ndarray) -> ndarray:
        """Return the bytes left if all layers are recomputed, `[L + 1, M, R]`: as each runs backward, then in the loss.

        The dry run has as many tokens as any rank gets. Token-slots beyond those of the dry run take what a layer saves
        of them, and as much again for gradients.
        """
        M, L, R = token_slots_MLR.shape
        room = np.inf if self.room_bytes is None else self.room_bytes
        beyond_MR = np.maximum(0, token_slots_MLR.max(axis=1, initial=0) - self.token_slots)
        beyond_bytes_MR = 2 * max(self.token_slot_bytes_L, default=0) * beyond_MR
        free_LMR = np.full((L + 1, M, R), room - self.layer_bytes) - beyond_bytes_MR
        free_LMR[-1] = room - self.loss_bytes
        return free_LMR
