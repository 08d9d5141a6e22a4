"""`StepPlan`: the placement of one step with its bound, its predicted seconds and its provenance."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from jaxtyping import Int16, Int64
from numpy import ndarray

from relibra.cluster import Dispatch, Topology
from relibra.errors import PlanError
from relibra.planning.placement import Homes, Placement, static_homes, step_skew
from relibra.routing.demand import Demand, ScheduledDemand

FORMAT_VERSION = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan(Placement):
    """Placement of one step, with its bound and predicted seconds.

    balancer        name of the balancer
    previous_map    the map before the step, from which experts move to their slots in `physical_to_logical_map`
    bound_ML        lowest load of the busiest rank that any plan with this schedule, these homes, these slots and this
                    scope can reach, in token-slots
    predicted       seconds per term of the objective (label `model`), and "total"
    plan_seconds    wall clock of planning
    assumed_model   model whose expert sizes were assumed; "": sizes were given
    demand_digest   `Demand.digest` of the planned load; "": not recorded
    """

    balancer: str
    previous_map: Int16[ndarray, "L E"]
    bound_ML: Int64[ndarray, "M L"]
    predicted: Mapping[str, float] = field(default_factory=dict)
    plan_seconds: float = 0.0
    assumed_model: str = ""
    demand_digest: str = ""

    @staticmethod
    def of_placement(
        placement: Placement,
        previous: Homes,
        bound_ML: Int64[ndarray, "M L"],
        *,
        balancer: str,
        demand_digest: str = "",
    ) -> StepPlan:
        """Return the plan of a placement, without a prediction.

        previous   homes before the step
        """
        return StepPlan(
            **{entry.name: getattr(placement, entry.name) for entry in fields(Placement)},
            previous_map=previous.physical_to_logical_map,
            bound_ML=bound_ML,
            balancer=balancer,
            demand_digest=demand_digest,
        )

    @staticmethod
    def static(demand: ScheduledDemand, topology: Topology, *, dispatch: Dispatch = "flat") -> StepPlan:
        """Return the static layout under the schedule of a demand: no moves, slots or prediction.

        dispatch   that of the plans to compare with, or `Cluster.dispatch`
        """
        homes = static_homes(topology, demand.layer_ids, demand.num_experts)
        M, L, R, _ = demand.tokens_MLRE.shape
        placement = Placement(
            **{entry.name: getattr(homes, entry.name) for entry in fields(Homes)},
            micro_batch_S=demand.micro_batch_S,
            rank_S=demand.rank_S,
            replica_MLRB=np.full((M, L, R, 0), -1, dtype=np.int16),
            quota_MLRB=np.zeros((M, L, R, 0), dtype=np.int32),
            group_M=demand.group_M,
            dispatch=dispatch,
        )
        bound_ML = placement.rank_load(demand).max(axis=2, initial=0)
        return StepPlan.of_placement(placement, homes, bound_ML, balancer="static", demand_digest=demand.digest())

    @property
    def previous(self) -> Homes:
        """Return the homes before the step."""
        return self._homes(self.layer_ids, self.previous_map)

    @property
    def num_moved(self) -> int:
        """Return the number of experts whose home rank changes before the step, over all layers."""
        return int((self.previous.home_LE != self.home_LE).sum())

    def bound(self, demand: ScheduledDemand) -> float:
        """Return the lowest `skew` that any plan with this schedule, these homes, slots and scope can reach."""
        return step_skew(self.bound_ML, self.rank_load(demand))

    def scheduled(self, demand: Demand) -> ScheduledDemand:
        """Return the demand under this plan's schedule; raises PlanError when the plan was made for another load."""
        if demand.counts_SLE.shape[0] != len(self.micro_batch_S):
            raise PlanError(f"plan of {len(self.micro_batch_S)} samples, demand of {len(demand.counts_SLE)} samples")
        if self.demand_digest and demand.digest() != self.demand_digest:
            raise PlanError("the plan was made for another demand (its digest differs): pass the one it was made for")
        return demand.with_schedule(self.micro_batch_S, self.rank_S, self.num_ranks, len(self.bound_ML))

    def digest(self) -> str:
        """Return the SHA-256 of all decisions: ranks with equal digests execute the same. Predictions are left out."""
        sizes = (FORMAT_VERSION, self.num_nodes, self.ranks_per_node)
        return self.digest_under(*sizes, self.resident, self.scope, self.gradient_wire)

    def digest_under(self, *facts: object) -> str:
        """Return the digest that begins with these facts; `plan_files` gives those of version 2."""
        digest = hashlib.sha256(repr(facts).encode())
        if self.dispatch != "flat":  # digests of flat plans stay as they were
            digest.update(self.dispatch.encode())
        for name, array in self.decisions().items():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def decisions(self) -> dict[str, ndarray]:
        """Return the executed arrays by name."""
        names = ("layer_ids", "micro_batch_S", "rank_S", "physical_to_logical_map", "previous_map")
        groups = () if self.group_M is None else ("group_M",)
        return {name: getattr(self, name) for name in (*names, "replica_MLRB", "quota_MLRB", *groups)}
