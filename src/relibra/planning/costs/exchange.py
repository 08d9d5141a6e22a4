"""`ExchangeCosts`: seconds and rows of dispatch and combine.

Dispatch carries a hidden state from its source rank to the rank that computes it, combine carries one back; in the
backward pass their gradients travel the same ways reversed. A rank sends one message to every other rank that gets rows
from it: a link costs alpha x messages + beta x bytes in each direction, both at once; links inside and between nodes
work at the same time. Each rank has a fixed part of its node's network, so the busiest rank decides. Between nodes a
`cluster.Transport` may have fences and, where rows go straight to ranks, a message per expert of each rank.

With hierarchical dispatch (`planning.traffic.relays`) a token crosses to another node once, whatever ranks compute
for it there, and is forwarded inside. The stage inside nodes then follows the one between them, and combine runs them
in reverse. Gate weights travel as with flat dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.cluster import Cluster, Link
from relibra.errors import PlanError
from relibra.parallel_map import parallel_map
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Placement
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.planning.traffic.puts import expert_puts
from relibra.planning.traffic.relays import rows_to_nodes, stage_rows
from relibra.planning.traffic.traffic import BETWEEN, IN, INSIDE, OUT, iterate_traffic, link_rows, send_once_share
from relibra.routing.demand import ScheduledDemand

Links = Literal["all links", "between nodes", "inside nodes"]
_AT_ONCE = 2048
"""Micro-batches x layers x ranks that one thread prices together: enough for numpy, few for a cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeStage:
    """Rows that travel at the same time, one pass; all ranks wait for its end.

    links                 that its rows use; flat dispatch is one stage on "all links"
    seconds_ML, back_ML   seconds along the traffic (to experts: hidden states, gradients of results) and against it
    out_MLR, in_MLR       rows that leave and enter a rank along the traffic
    messages_ML, fences_ML   of all ranks, along the traffic
    """

    links: Links
    seconds_ML: Float64[ndarray, "M L"]
    back_ML: Float64[ndarray, "M L"]
    out_MLR: Float64[ndarray, "M L R"]
    in_MLR: Float64[ndarray, "M L R"]
    messages_ML: Int64[ndarray, "M L"]
    fences_ML: Int64[ndarray, "M L"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeCosts:
    """Exchanges of rows and of gate weights, one pass each.

    stages                       of dispatch, in order; combine runs them in reverse, against the traffic
    network_out_MLR              rows that leave a rank for other nodes, along the traffic
    gates_ML, gates_back_ML      seconds of the gate weights, one number per token-slot, and of their gradients back
    gates_out_MLR, gates_in_MLR  token-slots that leave and enter a rank: gate weights are never shared between choices
    cross_node_ML                token-slots computed on another node than the one they come from
    """

    stages: tuple[ExchangeStage, ...]
    network_out_MLR: Float64[ndarray, "M L R"]
    gates_ML: Float64[ndarray, "M L"]
    gates_back_ML: Float64[ndarray, "M L"]
    gates_out_MLR: Float64[ndarray, "M L R"]
    gates_in_MLR: Float64[ndarray, "M L R"]
    cross_node_ML: Float64[ndarray, "M L"]

    @property
    def dispatch_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of rows along the traffic: hidden states, and gradients of results."""
        return np.stack([stage.seconds_ML for stage in self.stages]).sum(axis=0)

    @property
    def combine_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of rows against the traffic."""
        return np.stack([stage.back_ML for stage in self.stages]).sum(axis=0)

    @property
    def inside_ML(self) -> tuple[Float64[ndarray, "M L"], Float64[ndarray, "M L"]]:
        """Return the seconds of stages inside nodes, in which links between nodes are free: dispatch, and combine."""
        stages = [stage for stage in self.stages if stage.links == "inside nodes"]
        none_ML = np.zeros_like(self.gates_ML)
        return sum((stage.seconds_ML for stage in stages), none_ML), sum((stage.back_ML for stage in stages), none_ML)

    @property
    def out_MLR(self) -> Float64[ndarray, "M L R"]:
        """Return the rows that leave a rank along the traffic, forwarded ones among them."""
        return np.stack([stage.out_MLR for stage in self.stages]).sum(axis=0)

    @property
    def in_MLR(self) -> Float64[ndarray, "M L R"]:
        """Return the rows that enter a rank along the traffic, those that it forwards among them."""
        return np.stack([stage.in_MLR for stage in self.stages]).sum(axis=0)


def exchange_costs(
    plan: Placement,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    distinct: DistinctRows | None = None,
) -> ExchangeCosts:
    """Return the exchanges of each micro-batch and layer; seconds are those of the busiest rank and kind of link.

    With co-routing pairs (`demand.pairs_LEE`) a token travels once per destination rank, and with hierarchical dispatch
    once per node; pairs give a lower bound of these rows (`send_once_share`). Without pairs it travels once per choice,
    which is the upper bound.

    distinct   counted tokens from rank to rank and from rank to node (`distinct_rows_of_step`), in place of pairs
    raises     PlanError for pairs of other layers or experts
    """
    M, L, R, _ = plan.replica_MLRB.shape
    in_stages = plan.dispatch == "hierarchical" and plan.num_nodes > 1 and plan.ranks_per_node > 1
    share_LR, share_LN = _shares(plan, None if distinct is not None else demand.pairs_LEE)
    at_once = max(1, _AT_ONCE // (L * R))
    by_expert = cluster.transport.puts == "expert" and not in_stages
    node_R = np.arange(R) // plan.ranks_per_node
    other_node_RR = node_R[:, None] != node_R

    def costs_of(part: int) -> ExchangeCosts:
        micro_batches = range(part * at_once, min(M, (part + 1) * at_once))
        rows_2ML2R, slots_2ML2R = np.zeros((2, 2, len(micro_batches), L, 2, R))
        row_peers_2ML2R, peers_2ML2R = np.zeros((2, 2, len(micro_batches), L, 2, R), dtype=np.int64)
        puts_ML2R = np.zeros((len(micro_batches), L, 2, R), dtype=np.int64)
        for m, layers, traffic_LRR in iterate_traffic(plan, demand, micro_batches):
            at = np.s_[:, m - micro_batches.start, layers]
            rows_2ML2R[at], slots_2ML2R[at], peers_2ML2R[at] = link_rows(
                traffic_LRR, share_LR[layers], plan.ranks_per_node
            )
            row_peers_2ML2R[at] = peers_2ML2R[at]
            if by_expert:
                cut = (m, layers)
                arrays = (demand.tokens_MLRE[cut], plan.home_LE[layers], plan.replica_MLRB[cut], plan.quota_MLRB[cut])
                away_LRR = expert_puts(*arrays, plan.ranks_per_node) * other_node_RR
                puts_ML2R[at[1:]] = np.stack([away_LRR.sum(axis=2), away_LRR.sum(axis=1)], axis=1)
            if in_stages and distinct is not None:
                counted = distinct.ranks_MLRR[m, layers], distinct.nodes_MLRN[m, layers]
                rows_2ML2R[at], row_peers_2ML2R[at] = stage_rows(*counted)
            elif in_stages:
                rows_LRR = traffic_LRR * share_LR[layers, None]
                nodes_LRN = rows_to_nodes(traffic_LRR, rows_LRR, share_LN[layers])
                rows_2ML2R[at], row_peers_2ML2R[at] = stage_rows(rows_LRR, nodes_LRN)
            elif distinct is not None:
                counted_LRR = distinct.ranks_MLRR[m, layers].astype(np.int64)
                found = link_rows(counted_LRR, share_LR[layers], plan.ranks_per_node)
                rows_2ML2R[at], row_peers_2ML2R[at] = found[0], found[2]
        slots_ML2R, puts = slots_2ML2R.sum(axis=0), puts_ML2R if by_expert else None
        (gates,) = _stages(slots_2ML2R, peers_2ML2R, cluster, expert.bytes_per_value, in_stages=False)
        return ExchangeCosts(
            stages=_stages(rows_2ML2R, row_peers_2ML2R, cluster, expert.row_bytes, in_stages=in_stages, puts_ML2R=puts),
            network_out_MLR=rows_2ML2R[BETWEEN, :, :, OUT],
            gates_ML=gates.seconds_ML,
            gates_back_ML=gates.back_ML,
            gates_out_MLR=slots_ML2R[:, :, OUT],
            gates_in_MLR=slots_ML2R[:, :, IN],
            cross_node_ML=slots_2ML2R[BETWEEN, :, :, OUT].sum(axis=-1),
        )

    parts = parallel_map(costs_of, max(1, -(-M // at_once)))
    costs: ExchangeCosts = combine_arrays(lambda *arrays: np.concatenate(arrays), *parts)
    return costs


def combine_arrays(combine: Callable[..., ndarray], *values: Any) -> Any:
    """Return values of one type with their arrays combined, in tuples and dataclasses too; all else is the first's."""
    first = values[0]
    if isinstance(first, ndarray):
        return combine(*values)
    if isinstance(first, tuple):
        return tuple(combine_arrays(combine, *part) for part in zip(*values, strict=True))
    if not (names := getattr(type(first), "__dataclass_fields__", ())):  # `fields` and `replace` take longer than sums
        return first
    return type(first)(**{name: combine_arrays(combine, *(getattr(value, name) for value in values)) for name in names})


def rows_per_crossing(cluster: Cluster, demand: ScheduledDemand, home_LE: Int[ndarray, "L E"]) -> float:
    """Return the rows between nodes per token-slot computed on another node, for searches that see token-slots only.

    Below 1 where dispatch is hierarchical and pairs are known: choices of a token on one node share a row.
    """
    if cluster.dispatch == "flat" or 1 in (cluster.num_nodes, cluster.ranks_per_node) or demand.pairs_LEE is None:
        return 1.0
    tokens_LE = np.diagonal(demand.pairs_LEE, axis1=1, axis2=2).astype(np.float64)
    node_LE = home_LE // cluster.ranks_per_node
    share_LE = np.take_along_axis(
        send_once_share(demand.pairs_LEE, node_LE, cluster.num_nodes), node_LE.astype(np.int64), axis=1
    )
    token_slots = float(tokens_LE.sum())
    return float((tokens_LE * share_LE).sum()) / token_slots if token_slots else 1.0


def _shares(
    plan: Placement, pairs_LEE: Int[ndarray, "L E E2"] | None
) -> tuple[Float64[ndarray, "L R"], Float64[ndarray, "L N"]]:
    """Return the rows per token-slot at each rank and at each node; 1 without pairs."""
    L, R, N = len(plan.layer_ids), plan.num_ranks, plan.num_nodes
    if pairs_LEE is None:
        return np.ones((L, R)), np.ones((L, N))
    if pairs_LEE.shape != (*plan.home_LE.shape, plan.num_experts):
        raise PlanError(f"pairs have shape {pairs_LEE.shape}: expected layers x experts x experts of the plan")
    share_LR, share_LN = send_once_share(pairs_LEE, plan.home_LE, R), np.ones((L, N))
    if plan.dispatch == "hierarchical":
        share_LN = send_once_share(pairs_LEE, plan.home_LE // plan.ranks_per_node, N)
    return share_LR, share_LN


def _stages(
    rows_2ML2R: Float64[ndarray, "2 M L 2 R"],
    peers_2ML2R: Int64[ndarray, "2 M L 2 R"],
    cluster: Cluster,
    row_bytes: int,
    *,
    in_stages: bool,
    puts_ML2R: Int64[ndarray, "M L 2 R"] | None = None,
) -> tuple[ExchangeStage, ...]:
    """Return the rows as one stage on all links, or between nodes and then inside them.

    puts_ML2R   messages between nodes; None: one to each peer
    """
    transport, away_ML2R = cluster.transport, peers_2ML2R[BETWEEN] if puts_ML2R is None else puts_ML2R
    fences_ML2R = (away_ML2R if transport.fence_scope == "put" else peers_2ML2R[BETWEEN]) * bool(
        transport.fence_seconds
    )
    bytes_2ML2R = rows_2ML2R * float(row_bytes)
    inside_ML = cluster.intra.seconds(bytes_2ML2R[INSIDE], peers_2ML2R[INSIDE]).max(axis=(-2, -1))

    def seconds_MLR(link: Link, way: int) -> Float64[ndarray, "M L R"]:
        return link.seconds(bytes_2ML2R[BETWEEN, ..., way, :], away_ML2R[..., way, :])

    def between_ML(sent: int, received: int) -> Float64[ndarray, "M L"]:
        sending_MLR = seconds_MLR(cluster.inter_send, sent) + fences_ML2R[..., sent, :] * transport.fence_seconds
        return np.maximum(sending_MLR, seconds_MLR(cluster.inter_receive, received)).max(axis=-1)

    def stage(
        links: Links, seconds_ML: ndarray, back_ML: ndarray, rows_ML2R: ndarray, messages_ML2R: ndarray
    ) -> ExchangeStage:
        return ExchangeStage(
            links=links,
            seconds_ML=seconds_ML,
            back_ML=back_ML,
            out_MLR=rows_ML2R[:, :, OUT],
            in_MLR=rows_ML2R[:, :, IN],
            messages_ML=messages_ML2R[:, :, OUT].sum(axis=-1),
            fences_ML=fences_ML2R[:, :, OUT].sum(axis=-1) * (links != "inside nodes"),
        )

    along_ML, against_ML = between_ML(OUT, IN), between_ML(IN, OUT)
    if in_stages:
        return (
            stage("between nodes", along_ML, against_ML, rows_2ML2R[BETWEEN], away_ML2R),
            stage("inside nodes", inside_ML, inside_ML, rows_2ML2R[INSIDE], peers_2ML2R[INSIDE]),
        )
    slowest = np.maximum(inside_ML, along_ML), np.maximum(inside_ML, against_ML)
    return (stage("all links", *slowest, rows_2ML2R.sum(axis=0), away_ML2R + peers_2ML2R[INSIDE]),)
