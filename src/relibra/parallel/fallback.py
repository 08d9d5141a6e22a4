"""When a plan is not followed: every expert then runs at home, and one rank logs one warning.

for the whole step     `agree_on_step`: ranks hold different plans or demands, or the plan breaks a rule
for one micro-batch    `routes_fit` is false: a rank has other routes than those that the plan was made for, as
                       `rows/prepared_rows.py` found

Differences that remain when experts run at home, such as other homes, raise EngineError on all ranks instead. A layer
whose router does not follow the routes raises it on its own rank (`PlannedMicroBatch.check_choices`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from relibra.errors import EngineError, PlanError, RelibraError
from relibra.parallel.agreement import Agreement, Point, digest_word, refuse_differences
from relibra.parallel.balanced import BalancedEP, expert_shapes
from relibra.parallel.rows.prepared_rows import PreparedRows
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Place
from relibra.planning.validation import validate_plan
from relibra.routing.demand import Demand, ScheduledDemand

_log = logging.getLogger(__name__)


class AgreedStep(NamedTuple):
    """What all ranks agree on before a step.

    demand     under the schedule of the plan; None: the plan is not followed
    known      all ranks know the routes of the same micro-batches
    prepared   all have prepared the first of them
    """

    demand: ScheduledDemand | None
    known: bool
    prepared: bool


def agree_on_step(
    plan: StepPlan,
    demand: Demand,
    layers: dict[int, BalancedEP],
    sums: str,
    order: Sequence[int],
    agreement: Agreement,
    *,
    prepared: bool,
) -> AgreedStep:
    """Return what all ranks agree on; a plan that is not followed is logged with the reason. Collective.

    layers     by decoder layer
    sums       "fast" or "canonical", the same on all ranks
    order      micro-batches whose routes this rank knows, as they will run
    prepared   this rank has prepared the first of them before
    raises     EngineError when homes or sums differ between ranks, or the plan does not fit the model
    """
    scheduled, problem = None, ""
    try:
        scheduled = plan.scheduled(demand)
    except RelibraError as error:
        problem = f" ({error})"
    homes = np.stack([layer.physical_to_logical_E for layer in layers.values()]).astype("<i8").tobytes()
    tokens = b"" if scheduled is None else np.ascontiguousarray(scheduled.tokens_MLRE).tobytes()
    contents = (homes, sums.encode(), plan.digest().encode() + tokens, np.array(order, dtype="<i8").tobytes())
    own = [*(digest_word(content) for content in contents), scheduled is not None, prepared]
    told_RX = agreement.reach(Point.PLAN, own=own)
    refuse_differences(Place(agreement.rank, -1, -1), told_RX[:, :2], ("homes of experts (relocate)", "sums"))
    plan_R, order_R, usable_R, prepared_R = told_RX[:, 2:].unbind(dim=1)
    known, all_prepared = bool((order_R == order_R[0]).all()), bool(prepared_R.all())
    if unusable := (usable_R == 0).nonzero().flatten().tolist():
        problem = f"ranks {unusable} hold a demand that the plan was not made for{problem}"
    elif others := (plan_R != plan_R[0]).nonzero().flatten().tolist():
        problem = (
            f"ranks {others} hold another plan or demand than rank 0: make the plan on one rank and send it to the "
            "others, or plan with the same demand, budget and version everywhere"
        )
    else:
        assert scheduled is not None, "every rank has a demand"
        _check_fit(plan, layers)
        if not (problem := _find_broken_rule(plan, scheduled)):
            return AgreedStep(scheduled, known, all_prepared)
    if agreement.rank == (unusable[0] if unusable else 0):  # this rank knows the reason
        _log.warning("the plan is not followed, every expert runs at home: %s", problem)
    return AgreedStep(None, known, all_prepared)


def agree_on_micro_batch(
    agreement: Agreement, micro_batch: int, *, training: bool, passes: int, prepared: bool, next_prepared: bool
) -> tuple[bool, bool]:
    """Return whether all ranks have prepared, or are preparing, this micro-batch and the next one; collective.

    training   the model is in training mode: then activation checkpointing recomputes layers
    passes     digest of what this rank's passes have left in its slots (`ReplicaSlots.digest`)
    raises     EngineError, on all ranks, when they differ in micro-batch, gradients, training or passes: later messages
               could match a wrong receive
    """
    own = [torch.is_grad_enabled(), training, passes, prepared, next_prepared]
    told_RX = agreement.reach(Point.MICRO_BATCH, micro_batch, own)
    modes = ("gradients (torch.no_grad)", "training mode (model.eval())", "passes or optimizer steps")
    refuse_differences(Place(agreement.rank, -1, micro_batch), told_RX[:, :3], modes)
    this, following = told_RX[:, 3:].all(dim=0).tolist()
    return this, following


def routes_fit(rows: PreparedRows) -> bool:
    """Return whether the routes of all ranks are those of the plan; the first rank with others logs where."""
    place = rows.tables_L[0].place._replace(layer_id=-1)
    if True in rows.differs_R and rows.differs_R.index(True) == place.rank:
        _log.warning(
            "%s: the routes are not those of the plan (%s), so all ranks run this micro-batch at home: replay the "
            "routes that the plan was made for, with the ranks and micro-batches of its schedule",
            place,
            rows.problem,
        )
    return True not in rows.differs_R


def _find_broken_rule(plan: StepPlan, demand: Demand) -> str:
    """Return which rule the plan breaks; "": it is valid."""
    try:
        validate_plan(plan, plan.topology, demand)
    except PlanError as error:
        return str(error)
    return ""


def _check_fit(plan: StepPlan, layers: dict[int, BalancedEP]) -> None:
    """Raise EngineError, on all ranks or none, where layers, ranks, experts or homes are not those of the model."""
    first = next(iter(layers.values()))
    num_ranks, per_rank = first.ep_mesh.size(), first.num_local_experts
    for what, of_plan, of_model in (
        ("layers", plan.layer_ids.tolist(), list(layers)),
        ("ranks", plan.num_ranks, num_ranks),
        ("experts", plan.num_experts, num_ranks * per_rank),
    ):
        if of_plan != of_model:
            raise EngineError(f"the plan is for {what} {of_plan}, the model has {of_model}: plan for this model")
    homes_LE = np.stack([layer.physical_to_logical_E for layer in layers.values()])
    elsewhere_L = (plan.physical_to_logical_map != homes_LE).any(axis=1)
    if elsewhere_L.any():
        raise EngineError(
            f"the plan has other homes than the model in layers {plan.layer_ids[elsewhere_L].tolist()}: call "
            "relocate(model, plan.physical_to_logical_map, optimizer) first, or plan with Budget(move_homes=False)"
        )
    shapes = expert_shapes(layers.values())
    if plan.num_copies and len(shapes) > 1:
        raise EngineError(
            f"the plan has replicas, and the model has experts of different shapes, {shapes}: all layers use "
            "the same replica slots, so plan with Budget(slots=0)"
        )
