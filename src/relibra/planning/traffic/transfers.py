"""Transfers: which weights travel when, so that replicas are in their slots before their layers run.

Two residencies. *Ring*: one buffer of B slots per rank for all layers, so each replica of each (micro-batch, layer) is
pushed anew. *Resident*: slots of their own for every layer; what the next micro-batch needs again stays, and because
the future is known, the copy with the farthest next use makes room (Belady 1966: no other choice loads less). After
ForeMoE's transfer engine, arXiv 2606.11867.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, no_type_check

import numpy as np
from jaxtyping import Bool, Int16, Int32, Int64
from numpy import ndarray

from relibra.errors import PlanError
from relibra.planning.plan import StepPlan
from relibra.routing.compiled import compiled

Residency = Literal["ring", "resident"]

FROM_POOL = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferList:
    """Weight pushes of a forward sweep over all micro-batches, in the order in which they are needed.

    micro_batch_X, layer_X   when the copy is needed: before layer index `layer_X` of that micro-batch
    rank_X, slot_X           where it goes
    expert_X                 what it holds
    source_X                 home rank that sends it, or FROM_POOL: read from the host memory of the rank's own node
    slot_MLRB                slot in which each replica of the plan sits (-1: empty); with "ring" its own number
    """

    micro_batch_X: Int32[ndarray, " X"]
    layer_X: Int32[ndarray, " X"]
    rank_X: Int32[ndarray, " X"]
    slot_X: Int32[ndarray, " X"]
    expert_X: Int32[ndarray, " X"]
    source_X: Int32[ndarray, " X"]
    slot_MLRB: Int16[ndarray, "M L R B"]

    @property
    def num_transfers(self) -> int:
        """Copies pushed."""
        return len(self.expert_X)


def list_transfers(
    plan: StepPlan, *, residency: Residency, slots: int | None = None, pool: bool = False
) -> TransferList:
    """List the pushes that a plan's replicas need.

    slots    physical slots per rank (and layer, if resident), at least the plan's B; None: B
    pool     every copy is read from host memory, as in passes without gradients that have a `parallel.HostPool`; False:
             homes send, to other nodes too
    raises   PlanError for too few slots
    """
    slots = plan.slots if slots is None else slots
    if slots < plan.slots:
        raise PlanError(f"{slots} physical slots per rank cannot hold the {plan.slots} replicas of this plan")
    if residency == "ring":
        placed = np.where(plan.replica_MLRB >= 0, np.arange(plan.slots), -1).astype(np.int16)
        loaded = plan.replica_MLRB >= 0
    else:
        placed, loaded = place_in_resident_slots(plan.replica_MLRB, slots)
    micro_batch_X, layer_X, rank_X, b_X = np.nonzero(loaded)
    expert_X = plan.replica_MLRB[micro_batch_X, layer_X, rank_X, b_X].astype(np.int32)
    home_X = plan.home_LE[layer_X, expert_X].astype(np.int32)
    return TransferList(
        micro_batch_X=micro_batch_X.astype(np.int32),
        layer_X=layer_X.astype(np.int32),
        rank_X=rank_X.astype(np.int32),
        slot_X=placed[micro_batch_X, layer_X, rank_X, b_X].astype(np.int32),
        expert_X=expert_X,
        source_X=np.full_like(home_X, FROM_POOL) if pool else home_X,
        slot_MLRB=placed,
    )


def place_in_resident_slots(
    replica_MLRB: Int16[ndarray, "M L R B"], slots: int
) -> tuple[Int16[ndarray, "M L R B"], Bool[ndarray, "M L R B"]]:
    """Place replicas in slots that keep their content over micro-batches, loading as little as possible.

    returns   slot of each replica (-1: empty), and whether it has to be loaded for this micro-batch
    """
    slot_MLRB = np.full(replica_MLRB.shape, -1, dtype=np.int16)
    load_MLRB = np.zeros(replica_MLRB.shape, dtype=np.bool_)
    if slots:
        _keep_what_comes_next(replica_MLRB, slots, slot_MLRB, load_MLRB)
    return slot_MLRB, load_MLRB


@compiled
@no_type_check
def _keep_what_comes_next(replica_MLRB, slots, slot_MLRB, load_MLRB) -> None:
    M, L, R, B = replica_MLRB.shape
    held = np.empty(slots, np.int64)
    for layer in range(L):
        for r in range(R):
            held[:] = -1
            for m in range(M):
                wanted_B = replica_MLRB[m, layer, r]
                for b in range(B):
                    for slot in range(slots):
                        if wanted_B[b] >= 0 and held[slot] == wanted_B[b]:
                            slot_MLRB[m, layer, r, b] = slot
                for b in range(B):
                    if wanted_B[b] < 0 or slot_MLRB[m, layer, r, b] >= 0:
                        continue
                    farthest, victim = -1, -1
                    for slot in range(slots):
                        use = _next_use(replica_MLRB[:, layer, r], held[slot], m)
                        if use > farthest:
                            farthest, victim = use, slot
                    held[victim] = wanted_B[b]
                    slot_MLRB[m, layer, r, b] = victim
                    load_MLRB[m, layer, r, b] = True


@compiled
@no_type_check
def _next_use(replica_MB, expert, start) -> int:
    """Return the first micro-batch from `start` on that needs an expert; an empty slot is never needed."""
    M, B = replica_MB.shape
    if expert < 0:
        return M + 1
    for m in range(start, M):
        for b in range(B):
            if replica_MB[m, b] == expert:
                return m
    return M


def count_loads_reference(replica_MLRB: Int16[ndarray, "M L R B"], slots: int) -> Int64[ndarray, "L R"]:
    """Count the fewest loads per layer and rank by searching every eviction: exponential, for tiny cases."""
    M, L, R, _ = replica_MLRB.shape

    def fewest(wanted: list[frozenset[int]], held: frozenset[int]) -> int:
        if not wanted:
            return 0
        need, rest = wanted[0], wanted[1:]
        missing = need - held
        spare = slots - len(need)
        keepable = sorted(held - need)
        if len(keepable) <= spare:
            return len(missing) + fewest(rest, held | need)
        best = len(wanted) * slots + 1
        for mask in range(1 << len(keepable)):
            kept = frozenset(e for i, e in enumerate(keepable) if mask >> i & 1)
            if len(kept) == spare:
                best = min(best, len(missing) + fewest(rest, need | kept))
        return best

    loads_LR = np.zeros((L, R), dtype=np.int64)
    for layer in range(L):
        for r in range(R):
            wanted = [frozenset(int(e) for e in replica_MLRB[m, layer, r] if e >= 0) for m in range(M)]
            loads_LR[layer, r] = fewest(wanted, frozenset())
    return loads_LR
