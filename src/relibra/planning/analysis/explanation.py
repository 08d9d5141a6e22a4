"""A plan's decisions in a layer, its memory, and the difference of two plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relibra.errors import PlanError
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.loads import home_rank_load
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand


class Replica(NamedTuple):
    """A replica in a micro-batch: it computes `quota` of the `token_slots` of its expert.

    home_load    load of the home rank without replicas / of the mean rank. Above 1: the replica takes load off it; else
                 the replica keeps token-slots from travelling, or makes room at the home for replicas of others
    other_node   the replica is on another node than the home
    """

    expert: int
    token_slots: int
    rank: int
    quota: int
    home_rank: int
    home_load: float
    other_node: bool

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"expert {self.expert}: {self.quota:,} of {self.token_slots:,} token-slots on rank {self.rank}; home rank "
            f"{self.home_rank} at {self.home_load:.2f} x mean" + ", on another node" * self.other_node
        )


@dataclass(frozen=True, kw_only=True)
class LayerExplanation:
    """A plan's decisions in a layer and a micro-batch.

    moved_homes      experts that get a new home before the step
    token_slots      of all experts in the layer and micro-batch
    busiest_rank     without replicas
    bound            the lowest load of the busiest rank that replicas could reach
    replicas         by quota, the largest first
    """

    layer: int
    micro_batch: int
    moved_homes: int
    token_slots: int
    mean_load: float
    busiest_rank: int
    busiest_load: int
    busiest_load_with_replicas: int
    bound: int
    replicas: tuple[Replica, ...]


def explain_plan(plan: StepPlan, demand: Demand, layer: int, micro_batch: int | None = None) -> LayerExplanation:
    """Return the decisions of a plan in a layer, in one micro-batch or in the one that gains most.

    layer    decoder layer id, as in `plan.layer_ids`
    raises   PlanError for an unknown layer or micro-batch
    """
    layers = plan.layer_ids.tolist()
    if layer not in layers:
        raise PlanError(f"layer {layer} is not in the plan: it has layers {layers}")
    index = layers.index(layer)
    scheduled = plan.scheduled(demand)
    load_ME, home_E = scheduled.load_MLE[:, index], plan.home_LE[index].astype(int)
    before_MR = home_rank_load(load_ME[:, None], home_E[None], plan.num_ranks)[:, 0]
    after_MR = plan.rank_load(scheduled)[:, index]
    if micro_batch is None and len(load_ME):
        micro_batch = int(np.argmax(before_MR.max(axis=1) - after_MR.max(axis=1)))
    if micro_batch is None or not 0 <= micro_batch < len(load_ME):
        raise PlanError(f"micro-batch {micro_batch} is not in the plan: it has {len(load_ME)}, counted from 0")
    before_R, load_E = before_MR[micro_batch], load_ME[micro_batch]
    mean = float(load_E.sum() / plan.num_ranks)
    rank_X, slot_X = np.nonzero(plan.replica_MLRB[micro_batch, index] >= 0)
    expert_X = plan.replica_MLRB[micro_batch, index, rank_X, slot_X]
    quota_X = plan.quota_MLRB[micro_batch, index, rank_X, slot_X]

    def replica(e: int, rank: int, quota: int) -> Replica:
        home, G, mean_or_1 = int(home_E[e]), plan.ranks_per_node, mean or 1.0
        return Replica(e, int(load_E[e]), rank, quota, home, float(before_R[home] / mean_or_1), home // G != rank // G)

    order = np.lexsort((rank_X, expert_X, -quota_X.astype(int)))
    held = np.stack((expert_X, rank_X, quota_X), axis=1, dtype=int)[order].tolist()
    return LayerExplanation(
        layer=layer,
        micro_batch=micro_batch,
        moved_homes=int((plan.previous.home_LE[index] != home_E).sum()),
        token_slots=int(load_E.sum()),
        mean_load=mean,
        busiest_rank=int(before_R.argmax()),
        busiest_load=int(before_R.max()),
        busiest_load_with_replicas=int(after_MR[micro_batch].max()),
        bound=int(plan.bound_ML[micro_batch, index]),
        replicas=tuple(replica(*one) for one in held),
    )


class SlotMemory(NamedTuple):
    """Memory of a rank for the slots of a plan, and the next choice with more memory that takes fewer seconds.

    next_gib, next_saving   memory of that choice, and the share of seconds that it saves; None: none was found
    """

    gib: float
    next_gib: float | None = None
    next_saving: float | None = None

    def __str__(self) -> str:
        """Return one line."""
        saving = "" if self.next_saving is None else f"; {self.next_gib:.3g} GiB would save {self.next_saving:.2%}"
        return f"{self.gib:.3g} GiB{saving}"


def slot_memory(plan: StepPlan, expert: ExpertShape) -> SlotMemory:
    """Return the memory of a plan's slots, and what more memory would save."""
    gib = slot_bytes(plan, expert) / 2**30
    kept = [choice for choice in plan.considered if choice.schedule == "kept"]
    same = [choice for choice in kept if (choice.slots, choice.resident) == (plan.slots, plan.resident)]
    if not plan.num_copies or not same:
        return SlotMemory(gib)
    larger = [choice for choice in kept if choice.memory_gib > same[0].memory_gib and choice.seconds < same[0].seconds]
    if not larger:
        return SlotMemory(gib)
    found = min(larger, key=lambda choice: choice.memory_gib)
    return SlotMemory(gib, found.memory_gib, 1 - found.seconds / same[0].seconds)


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """What changes from one plan (`before`) to another (`after`), of one step or of two in a row.

    homes          (decoder layer, expert, rank before, rank after), by layer and expert
    samples        samples that run in another micro-batch or on another rank; None: the plans have different samples
    copies         replicas before and after
    cells          (micro-batch, layer) pairs whose replicas or quotas differ; None: numbers of pairs differ
    """

    homes: tuple[tuple[int, int, int, int], ...]
    samples: int | None
    copies: tuple[int, int]
    cells: int | None

    def __str__(self) -> str:
        """Return one line."""
        samples = "other samples" if self.samples is None else f"{self.samples} samples scheduled elsewhere"
        cells = "other micro-batches" if self.cells is None else f"{self.cells} (micro-batch, layer) pairs changed"
        return f"{len(self.homes)} homes moved; {samples}; copies {self.copies[0]} -> {self.copies[1]}, {cells}"


def diff(before: StepPlan, after: StepPlan) -> PlanDifference:
    """Compare two plans for the same model; raises PlanError when layers, experts or ranks differ."""
    sizes = [(plan.layer_ids.tolist(), plan.num_experts, plan.num_ranks) for plan in (before, after)]
    if sizes[0] != sizes[1]:
        raise PlanError(f"plans for different (layers, experts, ranks) cannot be compared: {sizes[0]} and {sizes[1]}")
    layer_X, expert_X = np.nonzero(before.home_LE != after.home_LE)
    homes = tuple(
        (int(before.layer_ids[layer]), int(e), int(before.home_LE[layer, e]), int(after.home_LE[layer, e]))
        for layer, e in zip(layer_X, expert_X, strict=True)
    )
    samples: int | None = None
    cells: int | None = None
    if len(before.micro_batch_S) == len(after.micro_batch_S) and before.demand_digest == after.demand_digest:
        moved_S = (before.micro_batch_S != after.micro_batch_S) | (before.rank_S != after.rank_S)
        samples = int(moved_S.sum())
    if before.bound_ML.shape == after.bound_ML.shape:
        cells = sum(
            int((_replica_table(before, layer) != _replica_table(after, layer)).any(axis=(1, 2)).sum())
            for layer in range(len(before.layer_ids))
        )
    return PlanDifference(homes=homes, samples=samples, copies=(before.num_copies, after.num_copies), cells=cells)


def _replica_table(plan: StepPlan, layer: int) -> np.ndarray:
    """Return 1 + quota of each (micro-batch, rank, expert) with a replica: independent of order and number of slots."""
    M, _, R, _ = plan.replica_MLRB.shape
    table_MRE = np.zeros((M, R, plan.num_experts), dtype=np.int64)
    m_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB[:, layer] >= 0)
    expert_X = plan.replica_MLRB[m_X, layer, rank_X, slot_X]
    table_MRE[m_X, rank_X, expert_X] = 1 + plan.quota_MLRB[m_X, layer, rank_X, slot_X].astype(np.int64)
    return table_MRE
