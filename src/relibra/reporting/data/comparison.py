"""Compare balancers on one step: each plan is validated by independent code and measured the same way.

`COLUMNS` are the figures as text, for the table of `relibra compare` and that of a page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numba.core.event import install_recorder
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import PlanError
from relibra.planning.analysis.bounds import any_homes_bound
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.prediction import predict
from relibra.planning.costs.step_bytes import StepBytes
from relibra.planning.placement import Homes, Scope, step_skew
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.planning.registry import find_balancer
from relibra.planning.validation import validate_plan
from relibra.reporting.data.number_format import gigabytes
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Figures of one balancer's plan of a step; None if it made no valid plan.

    balancer, sees             name; loads that it plans from
    skew, bound, gap           token objective: sum over micro-batches and layers of the busiest rank / sum of means;
                               the lowest that its schedule, homes, slots and scope allow; skew / bound - 1
    bound_any_homes            the lowest that its schedule, slots and scope allow with the best homes for each
                               micro-batch and layer
    scope                      allowed ranks of replicas: on the "node" of their home, or anywhere in the "cluster"
    worst                      largest max / mean of a single micro-batch and layer
    copies                     replicas over all micro-batches and layers; cross_node_copies: of these, away from the
                               node of their home
    moved_experts              experts with a new home rank
    slots, slots_used          spare slots per rank that the plan reserves; most that it fills on a rank
    slot_bytes                 memory of the reserved slots on a rank: weights and gradients
    bytes                      sent by all ranks in a step, by kind and link
    cross_node_token_slots     token-slots computed on another node than the one they come from
    cross_node_share           these as a share of all
    plan_seconds               wall clock on this machine, kernels compiled before (label `measured`)
    predicted_seconds          seconds of the step (label `model`), with all moves of experts before it, or its part of
                               them (`with_relocation_over`); for balancers that see live loads, with decisions and
                               pushes after the router, as their systems run them
    exposed_seconds            its part for copies that nothing hides
    relocation_seconds         its part for moving experts to new homes
    valid, message             result of `validate_plan`; if it failed, the reason
    """

    balancer: str
    sees: str
    valid: bool
    message: str = ""
    skew: float | None = None
    worst: float | None = None
    bound: float | None = None
    gap: float | None = None
    bound_any_homes: float | None = None
    scope: Scope | None = None
    copies: int | None = None
    copies_per_micro_batch_layer: float | None = None
    cross_node_copies: int | None = None
    moved_experts: int | None = None
    slots: int | None = None
    slots_used: int | None = None
    slot_bytes: int | None = None
    bytes: StepBytes | None = None
    cross_node_token_slots: int | None = None
    cross_node_share: float | None = None
    plan_seconds: float | None = None
    predicted_seconds: float | None = None
    exposed_seconds: float | None = None
    relocation_seconds: float | None = None

    def with_relocation_over(self, steps: int) -> ComparisonRow:
        """Return the row of one of `steps` steps that share the moves: both figures of seconds hold its part."""
        if self.predicted_seconds is None or self.relocation_seconds is None:
            return self
        part = self.relocation_seconds / steps
        without_moves = self.predicted_seconds - self.relocation_seconds
        return replace(self, predicted_seconds=without_moves + part, relocation_seconds=part)

    def figures(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return {**asdict(self), "bytes": None if self.bytes is None else self.bytes.as_dict()}


def iterate_comparison(
    demand: ScheduledDemand,
    cluster: Cluster,
    budget: Budget,
    balancers: Iterable[str],
    *,
    expert: ExpertShape,
    history_MLE: Int[ndarray, "H L E"] | None = None,
) -> Iterator[tuple[ComparisonRow, StepPlan | None]]:
    """Yield the row and the plan of each balancer; one that cannot plan this step gives a row with the reason.

    Plans are as the balancers made them, but where the static layout is faster it replaces relibra's, as in training.

    balancers     names of `BALANCERS`, or functions of the user as `module:function`
    history_MLE   what balancers that see "history" may plan from; None: they plan from even loads
    raises        PlanError for an unknown name, before the first plan
    """
    names = list(balancers)
    entries = {name: find_balancer(name) for name in names}
    for name in names:
        sees, given = entries[name].sees, dict[str, Any](expert=expert, history_MLE=history_MLE)
        try:
            compile_kernels(demand, cluster, budget, name, **given)
            plan = plan_step(demand, cluster, budget, name, never_worse=name == "relibra", **given)
        except PlanError as error:
            yield ComparisonRow(balancer=name, sees=sees, valid=False, message=str(error)), None
            continue
        row = measure(plan, demand, cluster, expert, balancer=name, sees=sees)
        yield row.with_relocation_over(budget.steps_served), plan


def compile_kernels(
    demand: ScheduledDemand,
    cluster: Cluster,
    budget: Budget,
    balancer: str,
    *,
    expert: ExpertShape,
    previous: Homes | None = None,
    history_MLE: Int[ndarray, "H L E"] | None = None,
) -> float:
    """Plan the first two layers to compile the kernels before planning is timed; return the seconds.

    0 where every kernel was compiled before.

    Errors of the request are ignored here: the plan of the whole step raises them.
    """
    start = time.perf_counter()
    with install_recorder("numba:compile") as compilations, suppress(PlanError):
        plan_step(
            first_layers(demand, 2),
            cluster,
            budget,
            balancer,
            expert=expert,
            previous=None if previous is None else previous.of_layers(np.arange(len(demand.layer_ids))[:2]),
            history_MLE=None if history_MLE is None else history_MLE[:, :2].copy(),
        )
    return time.perf_counter() - start if compilations.buffer else 0.0


def measure(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, expert: ExpertShape, *, balancer: str, sees: str
) -> ComparisonRow:
    """Check and measure one plan; `demand` is the step's, under any schedule. An invalid plan has no figures."""
    try:
        validate_plan(plan, cluster.topology, demand)
    except PlanError as error:
        return ComparisonRow(balancer=balancer, sees=sees, valid=False, message=str(error))
    scheduled = plan.scheduled(demand)
    load_MLR = plan.rank_load(scheduled)
    mean_ML = load_MLR.mean(axis=2)
    worst_ML = np.divide(load_MLR.max(axis=2), mean_ML, out=np.ones_like(mean_ML), where=mean_ML > 0)
    skew, bound = plan.skew(scheduled), plan.bound(scheduled)
    any_homes_ML = any_homes_bound(
        scheduled.load_MLE, cluster.num_ranks, cluster.ranks_per_node, plan.slots, plan.scope
    )
    prediction = predict(plan, scheduled, cluster, expert, live=sees == "live")
    return ComparisonRow(
        balancer=balancer,
        sees=sees,
        valid=True,
        skew=skew,
        worst=float(worst_ML.max(initial=1.0)),
        bound=bound,
        gap=skew / bound - 1,
        bound_any_homes=step_skew(any_homes_ML, load_MLR),
        scope=plan.scope,
        copies=plan.num_copies,
        copies_per_micro_batch_layer=plan.num_copies / max(1, worst_ML.size),
        cross_node_copies=plan.num_cross_node_copies,
        moved_experts=plan.num_moved,
        slots=plan.slots,
        slots_used=int((plan.replica_MLRB >= 0).sum(axis=3).max(initial=0)),
        slot_bytes=slot_bytes(plan, expert),
        bytes=prediction.bytes,
        cross_node_token_slots=prediction.cross_node_token_slots,
        cross_node_share=prediction.cross_node_token_slots / max(1, int(load_MLR.sum())),
        plan_seconds=plan.plan_seconds,
        predicted_seconds=prediction.total,
        exposed_seconds=prediction.copies,
        relocation_seconds=prediction.relocation,
    )


def first_layers(demand: ScheduledDemand, number: int) -> ScheduledDemand:
    """Return the demand of the first layers, in contiguous arrays.

    Kernels are compiled per memory layout. A layer of a one-layer array is contiguous, of a larger one not: take two.
    """
    return replace(
        demand,
        counts_SLE=demand.counts_SLE[:, :number].copy(),
        layer_ids=demand.layer_ids[:number],
        tokens_MLRE=demand.tokens_MLRE[:, :number].copy(),
        pairs_LEE=None if demand.pairs_LEE is None else demand.pairs_LEE[:number].copy(),
    )


class Column(NamedTuple):
    """One column of the table: its name, the text of a row that has a plan, and its meaning for the legend."""

    name: str
    cell: Callable[[ComparisonRow], str]
    meaning: str


def _bytes(row: ComparisonRow) -> StepBytes:
    assert row.bytes is not None, "measured"
    return row.bytes


_SKEW = "busiest ranks / mean ranks in token-slots, summed over micro-batches and layers"
_BOUND = "the lowest skew with the homes, slots, schedule and scope of copies of this row"
_ANY_HOMES = "the bound with the best homes for each micro-batch and layer"
_PUSHED = "weights sent to replicas before forward and again before backward"
_OPEN = "modelled seconds of copies that nothing hides"
_ACROSS = "token-slots computed on another node than their token"
_SLOTS = "memory of a rank's spare slots with gradients"
_BETWEEN = "sent between nodes: rows (a lower bound), gate weights, weights, gradients, and all moves"
_SCOPE = "where copies may be: on the node of their home, or in the cluster; bounds compare only within one"
_SECONDS = "modelled time of attention and experts, from a lower bound of the rows that travel; not measured"

COLUMNS = (
    Column("skew", lambda row: f"{row.skew:.3f}", _SKEW),
    Column("step s model", lambda row: f"{row.predicted_seconds:.3g}", _SECONDS),
    Column("copies", lambda row: f"{row.copies_per_micro_batch_layer:.1f}", "per micro-batch and layer"),
    Column("pushed GB", lambda row: gigabytes(_bytes(row).weights.total), _PUSHED),
    Column("across nodes", lambda row: f"{row.cross_node_share:.1%}", _ACROSS),
    Column("open s model", lambda row: f"{row.exposed_seconds:.2g}", _OPEN),
    Column("slots GB", lambda row: gigabytes(row.slot_bytes or 0), _SLOTS),
    Column("plan s", lambda row: f"{row.plan_seconds:.2f}", "measured here"),
    Column("bound", lambda row: f"{row.bound:.3f}", _BOUND),
    Column("gap", lambda row: f"{row.gap:.1%}", "skew / bound - 1"),
    Column("moved GB", lambda row: gigabytes(_bytes(row).moves.total), "state of experts with a new home"),
    Column("slots used", lambda row: f"{row.slots_used}/{row.slots}", "most filled on a rank / reserved"),
    Column("any homes", lambda row: f"{row.bound_any_homes:.3f}", _ANY_HOMES),
    Column("between GB", lambda row: gigabytes(sum(links.between for links in _bytes(row))), _BETWEEN),
    Column("moves s", lambda row: f"{row.relocation_seconds:.2g}", "part of step s for moves of experts"),
    Column("copies within", lambda row: row.scope or "-", _SCOPE),
)
"""The most important ones first: a narrow terminal has no room for the last."""
