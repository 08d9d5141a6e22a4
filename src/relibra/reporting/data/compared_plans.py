"""`Side`: a plan with its demand as one of the two things that a page holds side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.errors import ConfigError, PlanError
from relibra.planning.loads import home_rank_load
from relibra.planning.plan import StepPlan
from relibra.routing.demand import Demand
from relibra.routing.statistics import contiguous_homes

STATIC = "static layout"


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One plan under its own schedule.

    name     how the page calls it
    given    the demand under the schedule that the balancer was given
    demand   the same under the schedule of the plan
    """

    name: str
    plan: StepPlan
    given: Demand
    demand: Demand

    @property
    def words(self) -> str:
        """The name inside of a sentence."""
        return f"the {self.name}" if self.name == STATIC else self.name

    @property
    def rank_load_MLR(self) -> Int64[ndarray, "M L R"]:
        """Token-slots that each rank computes."""
        return self.plan.rank_load(self.demand)

    @property
    def skew(self) -> float:
        """Token objective."""
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
        place_X = (m_X, layer_X, plan.replica_MLRB[m_X, layer_X, rank_X, slot_X])
        quota_X = plan.quota_MLRB[m_X, layer_X, rank_X, slot_X].astype(np.int64)
        np.subtract.at(home_MLE, place_X, quota_X)
        np.maximum.at(busiest_MLE, place_X, quota_X)
        return np.maximum(home_MLE, busiest_MLE)


def named(label: str, before: Side, after: Side) -> str:
    """Label a figure of the second side: with its name where the first is a plan as well."""
    return label if before.name == STATIC else f"{label}, {after.name}"


def side_of(name: str, plan: StepPlan, demand: Demand) -> Side:
    """Put a plan beside others; raises PlanError when it was made for another demand."""
    return Side(name=name, plan=plan, given=demand, demand=plan.scheduled(demand))


def static_side(plan: StepPlan, demand: Demand) -> Side:
    """Return the static layout in place of a plan: no moves, no replicas, the schedule that the balancer was given.

    raises   PlanError for a demand without a schedule
    """
    if demand.tokens_MLRE is None:
        raise PlanError("the demand has no schedule, so there is no static layout to compare with: schedule it first")
    micro_batch_S, rank_S = demand.schedule
    M, L, R, E = demand.tokens_MLRE.shape
    slot_map = np.tile(np.arange(E, dtype=np.int16), (L, 1))
    home_LE = np.tile(contiguous_homes(E, R), (L, 1))
    static = replace(
        plan,
        balancer="static",
        micro_batch_S=micro_batch_S,
        rank_S=rank_S,
        physical_to_logical_map=slot_map,
        previous_map=slot_map,
        replica_MLRB=np.full((M, L, R, 0), -1, dtype=np.int16),
        quota_MLRB=np.zeros((M, L, R, 0), dtype=np.int32),
        bound_ML=home_rank_load(demand.load_MLE, home_LE, R).max(axis=2, initial=0),
        predicted={},
        plan_seconds=0.0,
    )
    return Side(name=STATIC, plan=static, given=demand, demand=demand)


def refuse_other_sizes(before: Side, after: Side) -> None:
    """Raise a ConfigError when two plans differ in ranks, experts or layers: their pictures have no common axes."""
    for noun in ("rank", "expert", "layer"):
        sizes = [
            len(side.plan.layer_ids) if noun == "layer" else getattr(side.plan, f"num_{noun}s")
            for side in (before, after)
        ]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{before.name} is for {sizes[0]:,} {noun}s, {after.name} for {sizes[1]:,}: only plans for equal "
                "ranks, experts and layers can be compared"
            )


def most_gaining(before: Side, after: Side) -> tuple[int, int]:
    """Return the micro-batch whose busiest ranks lose most over all layers, and the layer in which most of it is."""
    tops = [side.rank_load_MLR.max(axis=2, initial=0) for side in (before, after)]
    shared = min(map(len, tops))
    gain_ML = tops[0][:shared] - tops[1][:shared]
    m = int(gain_ML.sum(axis=1).argmax())
    return m, int(gain_ML[m].argmax())


def times_mean(load: Int64[ndarray, "*X R"]) -> Float64[ndarray, "*X R"]:
    """Return load / mean over the last axis; 1 where there is none."""
    mean = load.mean(axis=-1, keepdims=True)
    return np.divide(load, mean, out=np.ones(load.shape), where=mean > 0)
