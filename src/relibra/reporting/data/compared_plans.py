"""`ComparedPlan` and `ComparedStep`: one step under two plans, which a page shows side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import ConfigError, TraceError
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import MAX_PAIRS, DistinctRows, distinct_rows_of_step
from relibra.printable import plural
from relibra.routing.demand import ScheduledDemand
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.trace import RoutingTrace
from relibra.simulation import ModelShape, cut_model

STATIC = "static layout"


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedPlan:
    """One plan under its own schedule.

    name     on the page
    given    the demand under the schedule that the balancer was given
    demand   the same under the schedule of the plan
    rows     tokens that each rank sends to each rank and node, counted in the trace; a token with several choices there
             counts once; None: not counted
    """

    name: str
    plan: StepPlan
    given: ScheduledDemand
    demand: ScheduledDemand
    rows: DistinctRows | None = None

    @property
    def is_static(self) -> bool:
        """Whether this is the static layout, not a plan."""
        return self.name == STATIC

    @property
    def rank_load_MLR(self) -> Int64[ndarray, "M L R"]:
        """Token-slots that each rank computes."""
        return self.plan.rank_load(self.demand)

    @property
    def skew(self) -> float:
        """Sum over micro-batches and layers of the busiest rank's load / sum of the mean loads."""
        return self.plan.skew(self.demand)

    @property
    def bound(self) -> float:
        """The lowest skew with this plan's homes, schedule, slots and scope."""
        return self.plan.bound(self.demand)

    def instance_load_MLE(self) -> Int64[ndarray, "M L E"]:
        """Return the token-slots of the busiest instance of each expert: its home or a replica."""
        plan, home_MLE = self.plan, self.demand.load_MLE.copy()
        busiest_MLE = np.zeros_like(home_MLE)
        m_X, layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB >= 0)
        index_X = (m_X, layer_X, plan.replica_MLRB[m_X, layer_X, rank_X, slot_X])
        quota_X = plan.quota_MLRB[m_X, layer_X, rank_X, slot_X].astype(np.int64)
        np.subtract.at(home_MLE, index_X, quota_X)
        np.maximum.at(busiest_MLE, index_X, quota_X)
        return np.maximum(home_MLE, busiest_MLE)


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedStep:
    """One step under two plans on one machine.

    before          the static layout, or another plan
    after           the plan that the page is about
    model           with the layers, experts and choices per token that were routed
    raises          ConfigError when the plans differ in ranks, experts or layers
    """

    before: ComparedPlan
    after: ComparedPlan
    cluster: Cluster
    model: ModelShape

    def __post_init__(self) -> None:
        check_same_sizes(*((plan.name, plan.plan) for plan in self.plans))

    @property
    def plans(self) -> tuple[ComparedPlan, ComparedPlan]:
        """Both plans."""
        return self.before, self.after

    @property
    def shared_choices_known(self) -> bool:
        """Whether it is known which experts tokens choose together: from the trace, or from counts of pairs."""
        return all(plan.rows is not None or plan.demand.pairs_LEE is not None for plan in self.plans)

    def most_improved(self) -> tuple[int, int]:
        """Return the micro-batch whose busiest ranks lose most load over all layers, and its most improved layer."""
        busiest = [plan.rank_load_MLR.max(axis=2, initial=0) for plan in self.plans]
        shared = min(map(len, busiest))
        gain_ML = busiest[0][:shared] - busiest[1][:shared]
        m = int(gain_ML.sum(axis=1).argmax())
        return m, int(gain_ML[m].argmax())


def check_same_sizes(*plans: tuple[str, StepPlan]) -> None:
    """Raise a ConfigError when two plans (name, plan) differ in ranks, experts or layers."""
    for noun in ("rank", "expert", "layer"):
        sizes = [len(plan.layer_ids) if noun == "layer" else getattr(plan, f"num_{noun}s") for _, plan in plans]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{plans[0][0]} is for {plural(sizes[0], noun)}, {plans[1][0]} for {sizes[1]:,}: only plans for "
                "equal ranks, experts and layers can be compared"
            )


def compare_plan(name: str, plan: StepPlan, demand: ScheduledDemand) -> ComparedPlan:
    """Return a plan with its demand; raises PlanError when it was made for another demand."""
    return ComparedPlan(name=name, plan=plan, given=demand, demand=plan.scheduled(demand))


def compare_static(plan: StepPlan, demand: ScheduledDemand) -> ComparedPlan:
    """Return the static layout in place of a plan: no moves, no replicas, the schedule that the balancer was given."""
    return ComparedPlan(
        name=STATIC, plan=StepPlan.static(demand, plan.topology, dispatch=plan.dispatch), given=demand, demand=demand
    )


def compare_step(
    plans: tuple[ComparedPlan, ComparedPlan], cluster: Cluster, model: ModelShape, trace: RoutingTrace | None
) -> ComparedStep:
    """Return a step under two plans, with the routed part of the model.

    trace     of both plans: rows are counted in it token by token, unless that would take too long
    raises    TraceError when a demand was not counted from this trace
    """
    before, after = plans
    if trace is not None and _are_few(plans):
        experts_TLK, sample_T = np.asarray(trace.experts_TLK), sample_of_rows(trace, before.given)
        if not _share_samples(plans):
            raise TraceError(
                "the two plans were made for different samples, so one trace cannot hold both: leave it out"
            )
        before, after = (
            replace(plan, rows=distinct_rows_of_step(plan.plan, plan.demand, experts_TLK, sample_T)) for plan in plans
        )
    return ComparedStep(before=before, after=after, cluster=cluster, model=cut_model(model, after.given))


def can_count_rows(plans: Sequence[ComparedPlan]) -> bool:
    """Return whether `compare_step` would count the rows of these plans, given their trace."""
    return _are_few(plans) and _share_samples(plans)


def times_mean(
    load: Int64[ndarray, "*X R"], without_load: float = 1.0, of: Int64[ndarray, "*X R"] | None = None
) -> Float64[ndarray, "*X R"]:
    """Return load / mean over the last axis; `without_load` where there is no load.

    of   loads to divide by the mean of `load`; None: `load` itself
    """
    mean = load.mean(axis=-1, keepdims=True)
    return np.divide(load if of is None else of, mean, out=np.full(load.shape, without_load), where=mean > 0)


def _are_few(plans: Sequence[ComparedPlan]) -> bool:
    return max(plan.rank_load_MLR.size * plan.plan.num_ranks for plan in plans) <= MAX_PAIRS


def _share_samples(plans: Sequence[ComparedPlan]) -> bool:
    return all(np.array_equal(plan.given.sample_ids, plans[0].given.sample_ids) for plan in plans)
