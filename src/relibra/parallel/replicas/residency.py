"""`Residency`: which experts the resident slots of all ranks hold, and whose gradients wait there.

It follows from the plan and from the passes made so far, so every rank knows it without asking. Words:

round    one run over the micro-batches of a group (`Placement.group_M`), without an optimizer step inside
stay     consecutive micro-batches of a group in which an expert is in a slot. Its weights come once; its gradients are
         summed in the slot and go home in the backward pass that completes the stay, whichever micro-batch that is
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16, Int32, Int64
from numpy import ndarray

from relibra.errors import EngineError
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Push


class Settled(NamedTuple):
    """What becomes of the sums in one layer's resident slots in the backward pass of a micro-batch, on all ranks.

    before   sums of experts that lose their slots; they go home before this micro-batch's are added
    fresh    (rank, slot) where this micro-batch adds the first gradient of a sum
    after    sums that are complete with this micro-batch, and go home
    """

    before: list[Push]
    fresh: set[tuple[int, int]]
    after: list[Push]

    @staticmethod
    def at_once(pushes: Sequence[Push]) -> Settled:
        """Return that every gradient goes home in the pass that makes it."""
        return Settled([], {(push.replica, push.slot) for push in pushes}, list(pushes))


class Residency:
    """Contents of the resident slots of all ranks during one execution of a plan."""

    def __init__(self, plan: StepPlan) -> None:
        """Start with empty slots. The plan has its replicas where `keep_slots` puts them."""
        self._replica_MLRB = plan.replica_MLRB
        self._group_M = _groups(plan)
        self._first_MLRB, self._last_MLRB = _stays(self._replica_MLRB, self._group_M)
        self._position_LE = np.argsort(plan.physical_to_logical_map, axis=1)
        self._homes_per_rank = plan.num_experts // plan.num_ranks
        self._layer_ids = plan.layer_ids
        self._waiting_LRB = np.full(self._replica_MLRB.shape[1:], -1, dtype=np.int16)
        self._done_ML = np.zeros(self._replica_MLRB.shape[:2], dtype=bool)  # backward passes of this round
        self._begun: set[int] = set()  # micro-batches whose forward pass with gradients has begun in this round
        self._group = -1

    def has_replicas(self, micro_batch: int, layer: int) -> bool:
        """Return whether the plan has resident replicas on any rank."""
        return bool((self._replica_MLRB[micro_batch, layer] >= 0).any())

    def begin_forward(self, micro_batch: int, *, training: bool) -> bool:
        """Return whether a new round begins: another group, or this micro-batch again after a pass with gradients.

        training   whether the pass has gradients. A repeated pass without gradients begins a new round only if no
                   gradients wait
        raises     EngineError when gradients of the round before have not gone home
        """
        again = micro_batch in self._begun and (training or not (self._waiting_LRB >= 0).any())
        begins = again or bool(self._group_M[micro_batch] != self._group)
        if begins:
            self.refuse_waiting(f"micro-batch {micro_batch} starts another pass")
            self._group = int(self._group_M[micro_batch])
            self._done_ML[:] = False
            self._begun.clear()
        if training:
            self._begun.add(micro_batch)
        return begins

    def settle(self, micro_batch: int, layer: int, pushes: Sequence[Push]) -> Settled:
        """Note the backward pass of a (layer, micro-batch); return which sums go home.

        pushes   of the replicas that got tokens; none where the plan was not followed
        """
        waiting_RB, target_RB = self._waiting_LRB[layer], self._replica_MLRB[micro_batch, layer]
        used_RB = np.full_like(waiting_RB, -1)
        for push in pushes:
            used_RB[push.replica, push.slot] = push.expert
        used, other = used_RB >= 0, used_RB != waiting_RB
        before = self._pushes(layer, np.where(used & other, waiting_RB, -1))
        fresh = {(int(rank), int(slot)) for rank, slot in np.argwhere(used & other)}
        waiting_RB[used] = used_RB[used]
        self._done_ML[micro_batch, layer] = True
        undone_M1 = np.concatenate([[0], np.cumsum(~self._done_ML[:, layer])])
        first_RB, last_RB = self._first_MLRB[micro_batch, layer], self._last_MLRB[micro_batch, layer]
        complete_RB = (undone_M1[last_RB + 1] == undone_M1[first_RB]) & (waiting_RB == target_RB)
        after = self._pushes(layer, np.where(complete_RB, waiting_RB, -1))
        waiting_RB[complete_RB] = -1
        return Settled(before, fresh, after)

    def refuse_waiting(self, event: str) -> None:
        """Raise EngineError if gradients wait: after this event they would be lost, or change other weights."""
        if not (self._waiting_LRB >= 0).any():
            return
        layer, rank, slot = (int(index) for index in np.argwhere(self._waiting_LRB >= 0)[0])
        expert = int(self._waiting_LRB[layer, rank, slot])
        self._waiting_LRB[:] = -1  # raised once, not again when the execution ends
        raise EngineError(
            f"{event} while resident replicas hold gradients that have not gone home (of expert {expert} of layer "
            f"{self._layer_ids[layer]} on rank {rank}, and maybe of others): run forward and backward passes of all "
            "micro-batches of a group (plan.group_M; None: of the plan) before the optimizer steps"
        )

    def digest(self) -> int:
        """Return a number that is equal on ranks that made the same passes."""
        return zlib.crc32(self._waiting_LRB.tobytes() + self._done_ML.tobytes())

    def _pushes(self, layer: int, expert_RB: Int16[ndarray, "R B"]) -> list[Push]:
        """Return the ways between slots and homes, by (rank, slot)."""
        found = []
        for rank, slot in np.argwhere(expert_RB >= 0).tolist():
            expert = int(expert_RB[rank, slot])
            home, home_slot = divmod(int(self._position_LE[layer, expert]), self._homes_per_rank)
            found.append(Push(expert, home, home_slot, rank, slot, 0))
        return found


def keep_slots(plan: StepPlan) -> StepPlan:
    """Return the plan with every resident replica in the slot where the micro-batch before has it.

    A plan says which experts are in the resident slots of a rank, not in which of them one stays.
    """
    B, group_M = plan.slots, _groups(plan)
    replica_MLRB, quota_MLRB = plan.replica_MLRB.copy(), plan.quota_MLRB.copy()
    for m in range(1, len(group_M)):
        if B > 1 and group_M[m] == group_M[m - 1]:
            order_LRB = _kept_order(replica_MLRB[m - 1], replica_MLRB[m])
            for array_MLRB in (replica_MLRB, quota_MLRB):
                array_MLRB[m] = np.take_along_axis(array_MLRB[m], order_LRB, axis=-1)
    return replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB)


def _kept_order(before_LRB: Int16[ndarray, "L R B"], now_LRB: Int16[ndarray, "L R B"]) -> Int64[ndarray, "L R B"]:
    """Return which entry of `now` goes into each slot: experts that stay into their old slot, others into the rest."""
    B = before_LRB.shape[-1]
    same_LRBX = (before_LRB[..., :, None] == now_LRB[..., None, :]) & (now_LRB[..., None, :] >= 0)
    slot_key_LRB = np.where(same_LRBX.any(axis=-1), 0, B) + np.arange(B)
    entry_key_LRX = np.where(same_LRBX.any(axis=-2), same_LRBX.argmax(axis=-2), B + np.arange(B))
    order_LRB = np.empty(now_LRB.shape, dtype=np.int64)
    np.put_along_axis(order_LRB, np.argsort(slot_key_LRB, axis=-1), np.argsort(entry_key_LRX, axis=-1), axis=-1)
    return order_LRB


def _groups(plan: StepPlan) -> Int32[ndarray, " M"]:
    return np.zeros(len(plan.replica_MLRB), dtype=np.int32) if plan.group_M is None else plan.group_M


def _stays(
    replica_MLRB: Int16[ndarray, "M L R B"], group_M: Int32[ndarray, " M"]
) -> tuple[Int64[ndarray, "M L R B"], Int64[ndarray, "M L R B"]]:
    """Return the first and the last micro-batch of the stay that each replica belongs to."""
    M = len(group_M)
    first_MLRB = np.broadcast_to(np.arange(M)[:, None, None, None], replica_MLRB.shape).copy()
    last_MLRB = first_MLRB.copy()
    for m in range(1, M):
        stays = (replica_MLRB[m] == replica_MLRB[m - 1]) & (group_M[m] == group_M[m - 1])
        first_MLRB[m] = np.where(stays, first_MLRB[m - 1], m)
    for m in reversed(range(M - 1)):
        stays = (replica_MLRB[m] == replica_MLRB[m + 1]) & (group_M[m] == group_M[m + 1])
        last_MLRB[m] = np.where(stays, last_MLRB[m + 1], m)
    return first_MLRB, last_MLRB
