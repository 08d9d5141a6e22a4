"""`Decision`: what a balancer hands over; `plan_step` makes a checked `StepPlan` of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxtyping import Float64, Int, Int16, Int32
from numpy import ndarray

from relibra.planning.budget import Budget
from relibra.planning.plan import Scope
from relibra.routing.demand import ScheduledDemand

if TYPE_CHECKING:
    from relibra.cluster import Cluster
    from relibra.planning.costs.expert_shape import ExpertShape

Sees = Literal["nothing", "history", "step totals", "micro-batches", "live"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What a balancer is asked; the registry blanks what a balancer of its kind may not see.

    budget        its objective is decided: not None
    demand        with a schedule; for balancers that see "history" or "step totals" use `total_LE`, never the demand
    total_LE      token-slots per layer and expert that the balancer may plan homes and static replicas from
    previous_map  experts by home slot before the step
    warm          previous_map was planned for an earlier step, so it is a good start; False: it is the static layout
    history_MLE   loads of earlier micro-batches, for balancers that see "history"
    """

    demand: ScheduledDemand
    cluster: Cluster
    budget: Budget
    expert: ExpertShape
    previous_map: Int16[ndarray, "L E"]
    total_LE: Float64[ndarray, "L E"]
    warm: bool = False
    history_MLE: Int[ndarray, "H L E"] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """Homes, replicas and quotas, as in `StepPlan`.

    scheduled   the demand under another schedule, from balancers that move samples
    cut_short   the deadline ended the search
    """

    home_LE: Int16[ndarray, "L E"]
    replica_MLRB: Int16[ndarray, "M L R B"]
    quota_MLRB: Int32[ndarray, "M L R B"]
    resident: bool = False
    scope: Scope = "node"
    scheduled: ScheduledDemand | None = None
    cut_short: bool = False


@dataclass(frozen=True, kw_only=True)
class Balancer:
    """One entry of the registry.

    sees       what the planner may look at
    based_on   the paper or code it follows; "after ..." where no public code exists
    """

    decide: Callable[[Question], Decision]
    sees: Sees
    based_on: str
