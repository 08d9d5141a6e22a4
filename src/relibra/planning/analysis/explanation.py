"""Plans in words: the decisions in a layer with their reasons, and the difference of two plans."""

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


def explain_plan(plan: StepPlan, demand: Demand, layer: int, micro_batch: int | None = None) -> str:
    """Return sentences about the plan of a layer, in one micro-batch or in the one that gains most.

    layer    decoder layer id, as in `plan.layer_ids`
    raises   PlanError for an unknown layer or micro-batch
    """
    index = _index(plan, layer)
    scheduled = plan.scheduled(demand)
    load_ME = scheduled.load_MLE[:, index]
    home_E = plan.home_LE[index]
    before_MR = home_rank_load(load_ME[:, None], home_E[None], plan.num_ranks)[:, 0]
    after_MR = plan.rank_load(scheduled)[:, index]
    if len(load_ME) == 0:
        return f"layer {layer}: the step has no micro-batch"
    if micro_batch is None:
        micro_batch = int(np.argmax(before_MR.max(axis=1) - after_MR.max(axis=1)))
    if not 0 <= micro_batch < len(load_ME):
        raise PlanError(f"micro-batch {micro_batch} is not in the plan: it has 0..{len(load_ME) - 1}")
    before_R, after_R, load_E = before_MR[micro_batch], after_MR[micro_batch], load_ME[micro_batch]
    lines = [_homes_sentence(plan, index, layer)]
    mean = load_E.sum() / plan.num_ranks
    if mean == 0:
        return "\n".join([*lines, f"micro-batch {micro_batch}: no token is routed here"])
    lines.append(
        f"micro-batch {micro_batch}: {load_E.sum():,} token-slots, {mean:,.0f} per rank if even; busiest rank "
        f"{int(np.argmax(before_R))} would compute {before_R.max():,} ({before_R.max() / mean:.2f} x mean) from homes "
        f"alone, with replicas the busiest computes {after_R.max():,} ({after_R.max() / mean:.3f}); "
        f"lowest reachable {plan.bound_ML[micro_batch, index]:,}"
    )
    lines += _replica_sentences(plan, index, micro_batch, load_E, before_R, mean)
    return "\n".join(lines)


class SlotMemory(NamedTuple):
    """Memory of a rank for the slots of a plan, and the next choice with more memory that takes fewer seconds.

    next_gib, next_saving   its memory, and the share of seconds that it saves; None: none was priced, or none saves
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


def _index(plan: StepPlan, layer: int) -> int:
    found = np.flatnonzero(plan.layer_ids == layer)
    if not len(found):
        raise PlanError(f"layer {layer} is not in the plan: it has layers {plan.layer_ids.tolist()}")
    return int(found[0])


def _homes_sentence(plan: StepPlan, index: int, layer: int) -> str:
    moved_E = plan.previous.home_LE[index] != plan.home_LE[index]
    if not moved_E.any():
        return f"layer {layer}: every expert stays at home"
    return f"layer {layer}: {moved_E.sum()} of {len(moved_E)} experts get a new home before the step"


def _replica_sentences(
    plan: StepPlan, index: int, micro_batch: int, load_E: np.ndarray, before_R: np.ndarray, mean: float
) -> list[str]:
    """Return one sentence per expert with replicas, the largest quota first."""
    held_RB, quota_RB = plan.replica_MLRB[micro_batch, index], plan.quota_MLRB[micro_batch, index]
    experts = np.unique(held_RB[held_RB >= 0])
    if not len(experts):
        return [_why_none(plan, index, micro_batch, int(before_R.max()))]
    taken = {int(e): int(quota_RB[held_RB == e].sum()) for e in experts}
    sentences = []
    for e in sorted(taken, key=lambda e: (-taken[e], e)):
        ranks = np.flatnonzero((held_RB == e).any(axis=1))
        home = int(plan.home_LE[index, e])
        parts = " and ".join(f"{int(quota_RB[r][held_RB[r] == e].sum()):,} on rank {r}" for r in ranks)
        away = [int(r) for r in ranks if r // plan.ranks_per_node != home // plan.ranks_per_node]
        if before_R[home] > mean:
            why = f"its home, rank {home}, is at {before_R[home] / mean:.2f} x mean"
        elif any(choice.traffic_slots and choice.micro_batches_L[index] for choice in plan.considered_layers):
            why = "token-slots of that rank or node then need not travel to its home, or its home makes room for others"
        else:
            why = f"its home, rank {home}, makes room for load of busier ranks"
        network = f"; rank {', '.join(map(str, away))} on another node than its home" if away else ""
        word = "a copy" if len(ranks) == 1 else "copies"
        sentences.append(f"expert {e} ({load_E[e]:,} token-slots) gets {word}: {parts}, because {why}{network}")
    return sentences


def _why_none(plan: StepPlan, index: int, micro_batch: int, busiest: int) -> str:
    bound = int(plan.bound_ML[micro_batch, index])
    if " (instead of " in plan.balancer:
        return "no replicas: the plan with them would take more seconds"
    if plan.slots == 0:
        return "no replicas: the plan has no spare slots"
    if bound >= busiest:
        return "no replicas: nothing would lower the busiest rank"
    if plan.considered:
        return f"no replicas: {bound:,} could be reached, but in the model the copies cost more than they save"
    return f"no replicas: {plan.balancer} found none that lower the busiest rank ({bound:,} is the bound)"


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """Difference of a plan to another one, of the same step or of the step before.

    homes          (decoder layer, expert, rank before, rank after), by layer and expert
    samples        samples that run in another micro-batch or on another rank; -1: the plans have different samples
    copies         replicas before and after
    cells          (micro-batch, layer) pairs whose replicas or quotas differ; -1: other micro-batches
    """

    homes: tuple[tuple[int, int, int, int], ...]
    samples: int
    copies: tuple[int, int]
    cells: int

    def __str__(self) -> str:
        """Return one line."""
        samples = "other samples" if self.samples < 0 else f"{self.samples} samples scheduled elsewhere"
        cells = "other micro-batches" if self.cells < 0 else f"{self.cells} (micro-batch, layer) pairs changed"
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
    samples = cells = -1
    if len(before.micro_batch_S) == len(after.micro_batch_S):
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
