"""`StepPlan`: everything decided about one step before it runs.

Three groups of arrays: the *schedule* (which sample runs in which micro-batch, fed from which rank), the *homes* (which
rank owns each expert, for the whole step) and the *replicas* (which expert each spare slot holds in a micro-batch and
layer, and how many token-slots it computes there; the home computes the rest). How each source rank splits its tokens
over home and replicas follows from these by a fixed rule (`relibra.planning.traffic.split`), so it is not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Int16, Int32, Int64
from numpy import ndarray

from relibra.errors import PlanError
from relibra.planning.loads import home_rank_load, homes_of, moved_experts, replica_load_change
from relibra.routing.demand import Demand, ScheduledDemand

if TYPE_CHECKING:
    from relibra.cluster import Cluster

FORMAT_VERSION = 1

Scope = Literal["node", "cluster"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """Homes, replicas and schedule of one step, with what they are expected to cost.

    balancer                     who decided
    num_nodes, ranks_per_node    N and G; R = N G ranks, rank r on node r // G
    layer_ids                    absolute decoder layer of each entry of the layer axis
    micro_batch_S, rank_S        where each sample of the demand runs; micro-batch -1: left out
    physical_to_logical_map      [L, E] expert of each home slot; slot p lives on rank p // (E / R)
    previous_map                 the same before the step: what differs has to move
    replica_MLRB                 expert in each spare slot; -1: empty
    quota_MLRB                   token-slots that the replica computes; its home computes what is left
    resident                     True: slots belong to a layer and keep their replica over micro-batches where it stays
                                 the same; False: one buffer shared by all layers, filled anew each time
    scope                        "node": replicas stay on the node of their home; "cluster": anywhere
    bound_ML                     lowest load of the busiest rank that any plan with this schedule, these homes, these
                                 slots and this scope can reach, in token-slots
    predicted                    seconds per term of the objective (label `model`), and "total"
    objective                    what the balancer was asked to make small; "" where nobody recorded it
    demand_digest                `Demand.digest` of the load it was made for; "" where nobody recorded it
    cut_short                    a deadline ended the search
    """

    balancer: str
    num_nodes: int
    ranks_per_node: int
    layer_ids: Int32[ndarray, " L"]
    micro_batch_S: Int32[ndarray, " S"]
    rank_S: Int32[ndarray, " S"]
    physical_to_logical_map: Int16[ndarray, "L E"]
    previous_map: Int16[ndarray, "L E"]
    replica_MLRB: Int16[ndarray, "M L R B"]
    quota_MLRB: Int32[ndarray, "M L R B"]
    resident: bool
    scope: Scope
    bound_ML: Int64[ndarray, "M L"]
    predicted: Mapping[str, float] = field(default_factory=dict)
    plan_seconds: float = 0.0
    objective: str = ""
    demand_digest: str = ""
    cut_short: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the expert-parallel group, `R`."""
        return self.num_nodes * self.ranks_per_node

    @property
    def num_experts(self) -> int:
        """Logical experts per layer, `E`."""
        return self.physical_to_logical_map.shape[1]

    @property
    def slots(self) -> int:
        """Spare slots per rank, `B`."""
        return self.replica_MLRB.shape[3]

    @cached_property
    def home_LE(self) -> Int16[ndarray, "L E"]:
        """Home rank of each expert."""
        return homes_of(self.physical_to_logical_map, self.num_ranks)

    @property
    def num_copies(self) -> int:
        """Replicas over all micro-batches and layers."""
        return int((self.replica_MLRB >= 0).sum())

    @property
    def num_moved(self) -> int:
        """Experts whose home rank changes before the step, over all layers."""
        return int(moved_experts(self.previous_map, self.physical_to_logical_map, self.num_ranks).sum())

    def rank_load(self, demand: ScheduledDemand) -> Int64[ndarray, "M L R"]:
        """Token-slots that each rank computes under this plan; `demand` has this plan's schedule."""
        load_MLR = home_rank_load(demand.load_MLE, self.home_LE, self.num_ranks)
        return load_MLR + replica_load_change(self.replica_MLRB, self.quota_MLRB, self.home_LE)

    def skew(self, demand: ScheduledDemand) -> float:
        """Token objective: sum over micro-batches and layers of the busiest rank / the same sum of mean ranks."""
        load_MLR = self.rank_load(demand)
        return step_skew(load_MLR.max(axis=-1, initial=0), load_MLR)

    def bound(self, demand: ScheduledDemand) -> float:
        """The lowest `skew` that any plan with this schedule, these homes, these slots and this scope can reach."""
        return step_skew(self.bound_ML, self.rank_load(demand))

    def scheduled(self, demand: Demand) -> ScheduledDemand:
        """Return the demand under this plan's schedule; raises PlanError when the plan was made for another load."""
        if demand.counts_SLE.shape[0] != len(self.micro_batch_S):
            raise PlanError(f"a plan of {len(self.micro_batch_S)} samples meets {demand.counts_SLE.shape[0]} samples")
        if self.demand_digest and demand.digest() != self.demand_digest:
            raise PlanError("the plan was made for another demand (its digest differs): pass the one it was made for")
        return demand.with_schedule(self.micro_batch_S, self.rank_S, self.num_ranks, len(self.bound_ML))

    def validate(self, cluster: Cluster, demand: Demand) -> None:
        """Check the plan against the machine and the load, without trusting any solver; raises PlanError."""
        from relibra.planning.validation import validate_plan

        validate_plan(self, cluster, demand)

    def explain(self, demand: Demand, layer: int, micro_batch: int | None = None) -> str:
        """Say in words what happens in a layer (decoder layer id) and micro-batch, and why."""
        from relibra.planning.analysis.explanation import explain

        return explain(self, demand, layer, micro_batch)

    def digest(self) -> str:
        """Return the SHA-256 of every decision: ranks with equal digests will do the same. Predictions do not count."""
        sizes = (FORMAT_VERSION, self.num_nodes, self.ranks_per_node, self.resident, self.scope)
        digest = hashlib.sha256(repr(sizes).encode())
        for name, array in self.decisions().items():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def decisions(self) -> dict[str, ndarray]:
        """The arrays that decide what is executed, by name."""
        return {
            name: getattr(self, name)
            for name in (
                "layer_ids",
                "micro_batch_S",
                "rank_S",
                "physical_to_logical_map",
                "previous_map",
                "replica_MLRB",
                "quota_MLRB",
            )
        }


def cross_node_copies(plan: StepPlan) -> int:
    """Count the replicas that sit on another node than the home of their expert."""
    micro_batch_X, layer_X, rank_X, slot_X = np.nonzero(plan.replica_MLRB >= 0)
    home_X = plan.home_LE[layer_X, plan.replica_MLRB[micro_batch_X, layer_X, rank_X, slot_X]]
    return int((home_X // plan.ranks_per_node != rank_X // plan.ranks_per_node).sum())


def step_skew(top_ML: Int64[ndarray, "M L"], load_MLR: Int64[ndarray, "M L R"]) -> float:
    """Sum of `top_ML` / sum of mean rank loads; 1 for a step without load."""
    mean = load_MLR.sum(dtype=np.float64) / max(1, load_MLR.shape[-1])
    return float(top_ML.sum() / mean) if mean else 1.0


def map_of(
    home_LE: Int16[ndarray, "L E"], previous_map: Int16[ndarray, "L E"], num_ranks: int
) -> Int16[ndarray, "L E"]:
    """Lay homes into slots: experts that stay on their rank keep their slot, the others fill the rest by id."""
    previous_LE = homes_of(previous_map, num_ranks)
    previous_slot_LE = np.argsort(previous_map, axis=1, kind="stable")
    L, E = home_LE.shape
    per_rank = E // num_ranks
    slots = np.full((L, E), -1, dtype=np.int16)
    layer_X, expert_X = np.nonzero(home_LE == previous_LE)
    slots[layer_X, previous_slot_LE[layer_X, expert_X]] = expert_X
    layer_X, expert_X = np.nonzero(home_LE != previous_LE)
    order = np.lexsort((expert_X, home_LE[layer_X, expert_X], layer_X))
    free_layer, free_slot = np.nonzero(slots < 0)  # row-major: by layer, then by rank
    assert np.array_equal(free_layer, layer_X[order]), "homes do not fill their slots"
    assert np.array_equal(free_slot // per_rank, home_LE[layer_X, expert_X][order]), "a rank got too many homes"
    slots[free_layer, free_slot] = expert_X[order]
    return slots
