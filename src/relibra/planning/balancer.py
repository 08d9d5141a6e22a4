"""`PlacementRequest`: the input of a balancer; its output is a `Placement`. `Balancer`: an entry of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.budget import PEER_SLOTS, Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Considered, ConsideredLayers, Homes, Placement, Scope
from relibra.routing.demand import ScheduledDemand

Sees = Literal["nothing", "history", "step totals", "micro-batches", "live"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementRequest:
    """Input of a balancer, which uses only the loads that its `Balancer.sees` names.

    memory_gib    most memory of a rank for resident slots
    demand        balancers that see "history" or "step totals" plan from `total_LE`, never from the demand
    total_LE      token-slots per layer and expert from which it may plan homes, and replicas that stay for a whole step
    previous      homes before the step
    warm          `previous` was planned for an earlier step; False: it is the static layout
    history_MLE   loads of earlier micro-batches, for balancers that see "history"
    """

    demand: ScheduledDemand
    cluster: Cluster
    budget: Budget
    expert: ExpertShape
    memory_gib: float
    previous: Homes
    total_LE: Float64[ndarray, "L E"]
    warm: bool = False
    history_MLE: Int[ndarray, "H L E"] | None = None

    @property
    def slots(self) -> int:
        """Return the slots per rank for balancers that do not choose a number."""
        return PEER_SLOTS if self.budget.slots is None else self.budget.slots

    def of_layers(self, layers: Int64[ndarray, " l"]) -> PlacementRequest:
        """Return the request for some layers, given as positions on the layer axis."""
        return replace(
            self,
            demand=self.demand.of_layers(layers),
            previous=self.previous.of_layers(layers),
            total_LE=self.total_LE[layers],
            history_MLE=None if self.history_MLE is None else self.history_MLE[:, layers],
        )

    def empty_slots(self) -> tuple[Int16[ndarray, "M L R B"], Int32[ndarray, "M L R B"]]:
        """Return the spare slots of the budget without replicas, and their quotas of 0."""
        shape = (*self.demand.tokens_MLRE.shape[:3], self.slots)
        return np.full(shape, -1, dtype=np.int16), np.zeros(shape, dtype=np.int32)

    def placement(
        self,
        home_LE: Int[ndarray, "L E"],
        replica_MLRB: Int16[ndarray, "M L R B"],
        quota_MLRB: Int32[ndarray, "M L R B"],
        *,
        schedule: ScheduledDemand | None = None,
        resident: bool = False,
        scope: Scope = "node",
        considered: tuple[Considered, ...] = (),
        considered_layers: tuple[ConsideredLayers, ...] = (),
    ) -> Placement:
        """Return the placement with these home ranks, each expert in its old slot where it stays on its rank.

        schedule   the demand under another schedule, from balancers that move samples; None: as requested
        """
        homes = self.previous.with_home_ranks(home_LE.astype(np.int16))
        scheduled = schedule or self.demand
        return Placement(
            **{entry.name: getattr(homes, entry.name) for entry in fields(Homes)},
            micro_batch_S=scheduled.micro_batch_S,
            rank_S=scheduled.rank_S,
            replica_MLRB=replica_MLRB,
            quota_MLRB=quota_MLRB,
            resident=resident and bool((replica_MLRB >= 0).any()),
            group_M=scheduled.group_M,
            scope=scope,
            dispatch=self.cluster.dispatch,
            gradient_wire=self.budget.gradient_wire,
            considered=considered,
            considered_layers=considered_layers,
        )


@dataclass(frozen=True, kw_only=True)
class Balancer:
    """One entry of the registry.

    sees        loads that it plans from
    based_on    its paper or code; "after ...": our design from its description
    own_slots   its plan has as many slots as its system reserves, whatever the budget's number, but none for 0
    for_tokens  it evens token-slots out at any cost in seconds: `plan_step` never replaces its plans by cheaper ones
    """

    decide: Callable[[PlacementRequest], Placement]
    sees: Sees
    based_on: str
    own_slots: bool = False
    for_tokens: bool = False
