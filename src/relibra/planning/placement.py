"""`Homes`: the rank that owns each expert. `Placement`: homes, schedule and replicas of a step, chosen by a balancer.

Three groups of arrays: the *homes* (which rank owns each expert, for the whole step), the *schedule* (which sample runs
in which micro-batch, fed from which rank) and the *replicas* (which expert each spare slot holds in a micro-batch and
layer, and how many token-slots it computes there; the home computes the rest). How each source rank splits its tokens
over home and replicas follows from these by a fixed rule (`relibra.planning.traffic.split`), so it is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.cluster import Dispatch, Topology
from relibra.planning.costs.expert_shape import GradientWire
from relibra.planning.loads import home_rank_load, replica_load_change
from relibra.routing.demand import ScheduledDemand

Scope = Literal["node", "cluster"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Homes:
    """Home rank of each expert, and its slot there, on N nodes of G ranks; R = N G ranks, rank r on node r // G.

    num_nodes, ranks_per_node   N and G
    layer_ids                   absolute decoder layer of each entry of the layer axis
    physical_to_logical_map     expert of each home slot; slot p is on rank p // (E / R)
    """

    num_nodes: int
    ranks_per_node: int
    layer_ids: Int[ndarray, " L"]
    physical_to_logical_map: Int16[ndarray, "L E"]

    @property
    def topology(self) -> Topology:
        """Return nodes and ranks per node."""
        return Topology(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node)

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the expert-parallel group, `R`."""
        return self.num_nodes * self.ranks_per_node

    @property
    def num_experts(self) -> int:
        """Return the logical experts per layer, `E`."""
        return self.physical_to_logical_map.shape[1]

    @cached_property
    def home_LE(self) -> Int16[ndarray, "L E"]:
        """Return the home rank of each expert."""
        per_rank = max(1, self.num_experts // self.num_ranks)
        return (np.argsort(self.physical_to_logical_map, axis=1, kind="stable") // per_rank).astype(np.int16)

    def of_layers(self, layers: Int64[ndarray, " l"]) -> Homes:
        """Return the homes in some layers, given as positions on the layer axis."""
        return self._homes(self.layer_ids[layers], self.physical_to_logical_map[layers])

    def with_home_ranks(self, home_LE: Int[ndarray, "L E"]) -> Homes:
        """Return homes on other ranks: experts that stay on their rank keep their slot, the others fill the rest by id.

        home_LE   home rank of each expert, E / R experts on every rank
        """
        slot_LE = np.argsort(self.physical_to_logical_map, axis=1, kind="stable")
        slots = np.full(home_LE.shape, -1, dtype=np.int16)
        layer_X, expert_X = np.nonzero(home_LE == self.home_LE)
        slots[layer_X, slot_LE[layer_X, expert_X]] = expert_X
        layer_X, expert_X = np.nonzero(home_LE != self.home_LE)
        order = np.lexsort((expert_X, home_LE[layer_X, expert_X], layer_X))
        free_layer, free_slot = np.nonzero(slots < 0)  # row-major: by layer, then by rank
        free_rank = free_slot // (self.num_experts // self.num_ranks)
        assert np.array_equal(free_layer, layer_X[order]), "homes do not fill their slots"
        assert np.array_equal(free_rank, home_LE[layer_X, expert_X][order]), "a rank got too many homes"
        slots[free_layer, free_slot] = expert_X[order]
        return self._homes(self.layer_ids, slots)

    def _homes(self, layer_ids: ndarray, map_LE: ndarray) -> Homes:
        """Return plain `Homes` on these ranks, also from a subclass, whose other fields are dropped."""
        return Homes(
            num_nodes=self.num_nodes,
            ranks_per_node=self.ranks_per_node,
            layer_ids=layer_ids,
            physical_to_logical_map=map_LE,
        )


def static_homes(topology: Topology, layer_ids: Int[ndarray, " L"], num_experts: int) -> Homes:
    """Return the layout of plain expert parallelism: expert e on rank e // (E / R)."""
    return Homes(
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        layer_ids=layer_ids.astype(np.int32),
        physical_to_logical_map=np.tile(np.arange(num_experts, dtype=np.int16), (len(layer_ids), 1)),
    )


@dataclass(frozen=True, kw_only=True)
class Considered:
    """One choice that was priced for a step.

    schedule          "kept": samples stay in their micro-batches; "packed": they may change them
    slots, resident   as in `Placement`
    memory_gib        memory of a rank for these slots
    seconds           of the whole step, with moves / `steps_served`; estimated from a sample of layers (label `model`)
    chosen            the plan has this choice
    """

    schedule: Literal["kept", "packed"]
    slots: int
    resident: bool
    memory_gib: float
    seconds: float
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class ConsideredLayers:
    """One choice that was priced for every layer, under the schedule and the slots of the plan.

    homes, traffic_slots, tolerance, cross_node   as in `balancers.layer_plans.LayerChoice`
    seconds_L         of each layer over the step, with moves / `steps_served` (label `model`)
    micro_batches_L   micro-batches of each layer in which the plan follows this choice
    """

    homes: str
    traffic_slots: int
    tolerance: float | None
    cross_node: bool
    seconds_L: tuple[float, ...]
    micro_batches_L: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement(Homes):
    """Homes, schedule and replicas of one step: what a balancer returns.

    micro_batch_S, rank_S   micro-batch (-1: left out) and source rank of each sample
    replica_MLRB            expert in each spare slot; -1: empty
    quota_MLRB              token-slots that the replica computes; the home computes the rest
    resident                lifetime of the B slots. True: every layer has slots of its own, so replicas stay over
                            micro-batches; False: one buffer for all layers, filled for each pass
    group_M                 group that each micro-batch is in, ascending: a mini-batch or an expert-data-parallel
                            group (`ScheduledDemand.group_M`). Resident slots are filled anew at its start, and their
                            gradients go home at its end; None: all micro-batches are one group
    scope                   "node": replicas stay on the node of their home; "cluster": anywhere
    dispatch                how tokens reach ranks of other nodes (`Cluster.dispatch`)
    gradient_wire           type in which gradients of replicas travel home; sums are in float32
    considered              what was tried for the step, by balancers that price several plans
    considered_layers       what was tried for each layer
    """

    micro_batch_S: Int32[ndarray, " S"]
    rank_S: Int32[ndarray, " S"]
    replica_MLRB: Int16[ndarray, "M L R B"]
    quota_MLRB: Int32[ndarray, "M L R B"]
    resident: bool = False
    group_M: Int32[ndarray, " M"] | None = None
    scope: Scope = "node"
    dispatch: Dispatch = "flat"
    gradient_wire: GradientWire = "model"
    considered: tuple[Considered, ...] = ()
    considered_layers: tuple[ConsideredLayers, ...] = ()

    @property
    def slots(self) -> int:
        """Return the spare slots per rank, `B`."""
        return self.replica_MLRB.shape[3]

    @property
    def num_copies(self) -> int:
        """Return the number of replicas over all micro-batches and layers."""
        return int((self.replica_MLRB >= 0).sum())

    @property
    def num_cross_node_copies(self) -> int:
        """Return the number of replicas on another node than the home of their expert."""
        micro_batch_X, layer_X, rank_X, slot_X = np.nonzero(self.replica_MLRB >= 0)
        home_X = self.home_LE[layer_X, self.replica_MLRB[micro_batch_X, layer_X, rank_X, slot_X]]
        return int((home_X // self.ranks_per_node != rank_X // self.ranks_per_node).sum())

    def rank_load(self, demand: ScheduledDemand) -> Int64[ndarray, "M L R"]:
        """Return the token-slots that each rank computes; `demand` has this placement's schedule."""
        load_MLR = home_rank_load(demand.load_MLE, self.home_LE, self.num_ranks)
        return load_MLR + replica_load_change(self.replica_MLRB, self.quota_MLRB, self.home_LE)

    def skew(self, demand: ScheduledDemand) -> float:
        """Return the skew: loads of busiest ranks / loads of mean ranks, each summed over micro-batches and layers."""
        load_MLR = self.rank_load(demand)
        return step_skew(load_MLR.max(axis=-1, initial=0), load_MLR)


def step_skew(top_ML: Int64[ndarray, "M L"], load_MLR: Int64[ndarray, "M L R"]) -> float:
    """Return the sum of the loads `top_ML` of busiest ranks / sum of mean loads; 1 for a step without load."""
    mean = load_MLR.sum(dtype=np.float64) / max(1, load_MLR.shape[-1])
    return float(top_ML.sum() / mean) if mean else 1.0
