"""`Residency`: which experts the resident slots of all ranks hold, and whose gradients wait there.

It follows from the plan and from the passes made so far, so every rank knows it without asking. Words:

round    one run over the micro-batches of a group (`Placement.group_M`), without an optimizer step inside
stay     consecutive micro-batches of a group in which an expert is in a slot. Its weights come once; its gradients are
         summed in the slot and go home in the backward pass that completes the stay, whichever micro-batch that is
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int16, Int32, Int64
from numpy import ndarray

from relibra.errors import EngineError
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Push


class Settled(NamedTuple):
    """What becomes of the sums in one layer's resident slots in the backward pass of a micro-batch, on all ranks.

    before   sums of other experts, which go home before gradients of this micro-batch are added
    fresh    (rank, slot) where this micro-batch adds the first gradient of a sum
    after    sums that are complete with this micro-batch, and go home
    """

    before: list[Push]
    fresh: set[tuple[int, int]]
    after: list[Push]


class Residency:
    """Contents of the resident slots of all ranks during one execution of a plan."""

    def __init__(self, plan: StepPlan) -> None:
        """Start with empty slots. The plan has its replicas where `keep_slots` puts them."""
        self._replica_MLRA = plan.replica_MLRB
        self._group_M = _groups(plan)
        self._first_MLRA, self._last_MLRA = _stays(self._replica_MLRA, self._group_M)
        self._position_LE = np.argsort(plan.physical_to_logical_map, axis=1)
        self._homes_per_rank = plan.num_experts // plan.num_ranks
        self._layer_ids = plan.layer_ids
        self._held_LRA = np.full(self._replica_MLRA.shape[1:], -1, dtype=np.int16)
        self._waiting_LRA = self._held_LRA.copy()
        self._done_ML = np.zeros(self._replica_MLRA.shape[:2], dtype=bool)  # backward passes of this round
        self._begun: set[int] = set()  # micro-batches whose forward pass with gradients has begun in this round
        self._group = -1

    def has_replicas(self, micro_batch: int, layer: int) -> bool:
        """Return whether the plan has resident replicas on any rank."""
        return bool((self._replica_MLRA[micro_batch, layer] >= 0).any())

    def begin_forward(self, micro_batch: int, *, training: bool) -> None:
        """Start a new round if this forward pass is in another group, or comes a second time: weights may have changed.

        training   whether the pass has gradients. A repeated pass without gradients begins a new round only if no
                   gradients wait
        raises     EngineError when gradients of the round before have not gone home
        """
        again = micro_batch in self._begun and (training or not (self._waiting_LRA >= 0).any())
        if again or self._group_M[micro_batch] != self._group:
            self.refuse_waiting(f"micro-batch {micro_batch} starts another pass")
            self.forget_weights()
            self._group = int(self._group_M[micro_batch])
            self._done_ML[:] = False
            self._begun.clear()
        if training:
            self._begun.add(micro_batch)

    def missing(self, used_LRA: Int16[ndarray, "L R A"]) -> Bool[ndarray, "L R A"]:
        """Return the slots that do not hold the weights of the experts that they are used for (-1: for none)."""
        missing_LRA: ndarray = (used_LRA >= 0) & (used_LRA != self._held_LRA)
        return missing_LRA

    def fill(self, layer: int, used_RA: Int16[ndarray, "R A"]) -> None:
        """Note that the missing weights are there, or on their way."""
        self._held_LRA[layer] = np.where(used_RA >= 0, used_RA, self._held_LRA[layer])

    def settle(self, micro_batch: int, layer: int, used_RA: Int16[ndarray, "R A"]) -> Settled:
        """Note the backward pass of a (layer, micro-batch); return which sums go home.

        used_RA   experts that got tokens in the resident slots, else -1; all -1 where the plan was not followed
        """
        waiting_RA, target_RA = self._waiting_LRA[layer], self._replica_MLRA[micro_batch, layer]
        used, other = used_RA >= 0, used_RA != waiting_RA
        before = self._pushes(layer, np.where(used & other, waiting_RA, -1))
        fresh = {(int(rank), int(slot)) for rank, slot in np.argwhere(used & other)}
        waiting_RA[used] = used_RA[used]
        self._done_ML[micro_batch, layer] = True
        undone_M1 = np.concatenate([[0], np.cumsum(~self._done_ML[:, layer])])
        first_RA, last_RA = self._first_MLRA[micro_batch, layer], self._last_MLRA[micro_batch, layer]
        complete_RA = (undone_M1[last_RA + 1] == undone_M1[first_RA]) & (waiting_RA == target_RA)
        after = self._pushes(layer, np.where(complete_RA, waiting_RA, -1))
        waiting_RA[complete_RA] = -1
        return Settled(before, fresh, after)

    def forget_weights(self) -> None:
        """Mark all weights as outdated."""
        self._held_LRA[:] = -1

    def refuse_waiting(self, event: str) -> None:
        """Raise EngineError if gradients wait: after this event they would be lost, or change other weights."""
        if not (self._waiting_LRA >= 0).any():
            return
        layer, rank, slot = (int(index) for index in np.argwhere(self._waiting_LRA >= 0)[0])
        expert = int(self._waiting_LRA[layer, rank, slot])
        self._waiting_LRA[:] = -1  # raised once, not again when the execution ends
        raise EngineError(
            f"{event} while resident replicas hold gradients that have not gone home (of expert {expert} of layer "
            f"{self._layer_ids[layer]} on rank {rank}, and maybe of others): run forward and backward passes of all "
            "micro-batches of a group (plan.group_M; None: of the plan) before the optimizer steps"
        )

    def digest(self) -> int:
        """Return a number that ranks compare: they have made the same passes."""
        arrays = (self._held_LRA, self._waiting_LRA, self._done_ML)
        return zlib.crc32(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))

    def _pushes(self, layer: int, expert_RA: Int16[ndarray, "R A"]) -> list[Push]:
        """Return the ways between slots and homes, by (rank, slot)."""
        found = []
        for rank, slot in np.argwhere(expert_RA >= 0).tolist():
            expert = int(expert_RA[rank, slot])
            home, home_slot = divmod(int(self._position_LE[layer, expert]), self._homes_per_rank)
            found.append(Push(expert, home, home_slot, rank, slot, 0))
        return found


def keep_slots(plan: StepPlan) -> StepPlan:
    """Return the plan with every resident replica in the slot where the micro-batch before has it.

    A plan says which experts are in the resident slots of a rank, not in which of them one stays.
    """
    A, group_M = plan.slots, _groups(plan)
    replica_MLRB, quota_MLRB = plan.replica_MLRB.copy(), plan.quota_MLRB.copy()
    for m in range(1, len(group_M)):
        if A > 1 and group_M[m] == group_M[m - 1]:
            order_LRA = _kept_order(replica_MLRB[m - 1], replica_MLRB[m])
            for array_MLRB in (replica_MLRB, quota_MLRB):
                array_MLRB[m] = np.take_along_axis(array_MLRB[m], order_LRA, axis=-1)
    return replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB)


def _kept_order(before_LRA: Int16[ndarray, "L R A"], now_LRA: Int16[ndarray, "L R A"]) -> Int64[ndarray, "L R A"]:
    """Return which entry of `now` goes into each slot: experts that stay into their old slot, others into the rest."""
    A = before_LRA.shape[-1]
    same_LRAX = (before_LRA[..., :, None] == now_LRA[..., None, :]) & (now_LRA[..., None, :] >= 0)
    slot_key_LRA = np.where(same_LRAX.any(axis=-1), 0, A) + np.arange(A)
    entry_key_LRX = np.where(same_LRAX.any(axis=-2), same_LRAX.argmax(axis=-2), A + np.arange(A))
    order_LRA = np.empty(now_LRA.shape, dtype=np.int64)
    np.put_along_axis(order_LRA, np.argsort(slot_key_LRA, axis=-1), np.argsort(entry_key_LRX, axis=-1), axis=-1)
    return order_LRA


def _groups(plan: StepPlan) -> Int32[ndarray, " M"]:
    return np.zeros(len(plan.replica_MLRB), dtype=np.int32) if plan.group_M is None else plan.group_M


def _stays(
    replica_MLRA: Int16[ndarray, "M L R A"], group_M: Int32[ndarray, " M"]
) -> tuple[Int64[ndarray, "M L R A"], Int64[ndarray, "M L R A"]]:
    """Return the first and the last micro-batch of the stay that each replica belongs to."""
    M = len(group_M)
    first_MLRA = np.broadcast_to(np.arange(M)[:, None, None, None], replica_MLRA.shape).copy()
    last_MLRA = first_MLRA.copy()
    for m in range(1, M):
        stays = (replica_MLRA[m] == replica_MLRA[m - 1]) & (group_M[m] == group_M[m - 1])
        first_MLRA[m] = np.where(stays, first_MLRA[m - 1], m)
    for m in reversed(range(M - 1)):
        stays = (replica_MLRA[m] == replica_MLRA[m + 1]) & (group_M[m] == group_M[m + 1])
        last_MLRA[m] = np.where(stays, last_MLRA[m + 1], m)
    return first_MLRA, last_MLRA
