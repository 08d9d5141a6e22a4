"""When a plan is not followed: every expert then runs at home, and one rank logs one warning.

for the whole step     `agree_on_step`: ranks hold different plans or demands, or the plan breaks a rule
for one micro-batch    `routes_fit`: the routes of any rank are not those that the plan was made for

Differences that remain when experts run at home, such as other homes, raise EngineError on all ranks instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from relibra.errors import EngineError, PlanError
from relibra.parallel.agreement import Agreement, Mode, Point, digest_words, refuse_other_modes
from relibra.parallel.balanced import BalancedEP, expert_shapes
from relibra.parallel.rows.prepared_rows import PreparedRows
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Place
from relibra.planning.validation import validate_plan
from relibra.routing.demand import Demand, ScheduledDemand

_log = logging.getLogger(__name__)

_USABLE, _ORDER, _PREPARED = 0, 7, 8
_HOMES, _SUMS, _PLAN = slice(1, 3), slice(3, 5), slice(5, 7)
"""Columns of what ranks tell one another before a step (`_exchange_digests`)."""


class KnownRoutes(NamedTuple):
    """Micro-batches whose routes this rank knows when a step begins.

    order      in which they will run
    prepared   this rank has prepared the first of them before
    """

    order: Sequence[int]
    prepared: bool


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
    routes: KnownRoutes,
    agreement: Agreement,
) -> AgreedStep:
    """Return what all ranks agree on; a plan that is not followed is logged with the reason. Collective.

    layers   by decoder layer
    sums     "fast" or "canonical", the same on all ranks
    raises   EngineError when homes or sums differ between ranks, or the plan does not fit the model
    """
    scheduled = _schedule(plan, demand)
    told_RX = _exchange_digests(plan, scheduled, list(layers.values()), sums, routes, agreement)
    known, prepared = bool((told_RX[:, _ORDER] == told_RX[0, _ORDER]).all()), bool(told_RX[:, _PREPARED].all())
    problem = _find_disagreement(told_RX, scheduled)
    if problem is None:
        assert isinstance(scheduled, ScheduledDemand), "a rank without a demand is a disagreement"
        _check_fit(plan, layers)
        if (problem := _find_broken_rule(plan, scheduled)) is None:
            return AgreedStep(scheduled, known, prepared)
    if agreement.rank == 0:
        _log.warning("the plan is not followed, every expert runs at home: %s", problem)
    return AgreedStep(None, known, prepared)


class MicroBatchMode(NamedTuple):
    """What this rank is about to do in a micro-batch.

    training        the model is in training mode: then activation checkpointing recomputes layers
    passes          digest of what this rank's passes have left in resident slots (`Residency.digest`); 0 without any
    prepared        this rank has prepared the micro-batch, or is doing so
    next_prepared   the same of the micro-batch behind it
    """

    training: bool
    passes: int
    prepared: bool
    next_prepared: bool


def agree_on_micro_batch(agreement: Agreement, micro_batch: int, mode: MicroBatchMode) -> tuple[bool, bool]:
    """Exchange what each rank is about to do; return what all ranks have prepared: this one, the next; collective.

    raises   EngineError, on all ranks, when they differ in micro-batch, gradients, training or passes: later messages
             could match a wrong receive
    """
    place = Place(agreement.rank, -1, micro_batch)
    told_RX = agreement.reach(Point.MICRO_BATCH, micro_batch, [torch.is_grad_enabled(), *mode])
    gradients_R, training_R, passes_R, prepared_R, next_R = told_RX.unbind(dim=1)
    refuse_other_modes(
        place,
        [
            Mode(gradients_R.tolist(), "enter with gradients", "without (torch.no_grad)"),
            Mode(training_R.tolist(), "have the model in training mode", "in evaluation mode (model.eval())"),
        ],
    )
    if (passes_R != passes_R[0]).any():
        raise EngineError(
            f"{place}: the ranks of the group are in states of resident slots (a number tells them apart) "
            f"{passes_R.tolist()}: run forward and backward passes in one order on all ranks; optimizers step on all "
            "ranks or on none"
        )
    return bool(prepared_R.all()), bool(next_R.all())


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


def _schedule(plan: StepPlan, demand: Demand) -> ScheduledDemand | PlanError:
    """Return the demand under the schedule of the plan, or the error, the reason to run at home."""
    try:
        return plan.scheduled(demand)
    except PlanError as error:
        return error


def _exchange_digests(
    plan: StepPlan,
    demand: ScheduledDemand | PlanError,
    layers: list[BalancedEP],
    sums: str,
    routes: KnownRoutes,
    agreement: Agreement,
) -> Int64[Tensor, "R X"]:
    """Return what all ranks tell; collective. Columns as in `_USABLE` and the others.

    Told are: whether the demand fits the plan; two numbers each of digests of homes, sums, and plan with demand; one of
    the order of micro-batches with known routes; whether the first of them is prepared.
    """
    homes = np.stack([layer.physical_to_logical_E for layer in layers]).astype("<i8").tobytes()
    usable = not isinstance(demand, PlanError)
    tokens = b"" if isinstance(demand, PlanError) else np.ascontiguousarray(demand.tokens_MLRE).tobytes()
    parts = [digest_words(part) for part in (homes, sums.encode(), plan.digest().encode() + tokens)]
    order = digest_words(np.array(routes.order, dtype="<i8").tobytes())[0]
    return agreement.reach(Point.PLAN, own=[usable, *(word for part in parts for word in part), order, routes.prepared])


def _find_disagreement(told_RX: Int64[Tensor, "R X"], demand: ScheduledDemand | PlanError) -> str | None:
    """Return why the ranks cannot follow the plan; None: they can.

    told_RX   see `_exchange_digests`
    raises    EngineError when homes or sums differ: then running at home is wrong too
    """

    def differing(part: slice) -> list[int]:
        return (told_RX[:, part] != told_RX[0, part]).any(dim=1).nonzero().flatten().tolist()

    if ranks := differing(_HOMES):
        raise EngineError(
            f"ranks {ranks} have experts at other homes than rank 0, so weights are mixed up: relocate on all ranks "
            "alike, and resume from the last checkpoint"
        )
    if ranks := differing(_SUMS):
        raise EngineError(
            f"ranks {ranks} execute with other sums than rank 0: pass the same to execute_plan on all ranks"
        )
    if unusable := (told_RX[:, _USABLE] == 0).nonzero().flatten().tolist():
        own_reason = f" ({demand})" if isinstance(demand, PlanError) else ""
        return f"ranks {unusable} hold a demand that the plan was not made for{own_reason}"
    if ranks := differing(_PLAN):
        return (
            f"ranks {ranks} hold another plan or demand than rank 0: make the plan on one rank and send it to the "
            "others, or plan with the same demand and version everywhere and without a deadline"
        )
    return None


def _find_broken_rule(plan: StepPlan, demand: Demand) -> str | None:
    """Return which rule the plan breaks; None: it is valid."""
    try:
        validate_plan(plan, plan.topology, demand)
    except PlanError as error:
        return str(error)
    return None


def _check_fit(plan: StepPlan, layers: dict[int, BalancedEP]) -> None:
    """Compare the plan with layers, ranks, experts and homes of the model, with one result on all ranks."""
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
