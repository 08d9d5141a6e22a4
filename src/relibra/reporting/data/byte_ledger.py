"""The byte ledger: useful, duplicate and forwarded bytes of dispatches.

Switching Efficiency (arXiv 2604.14690) splits the used share of a network's capacity into three factors:

    useful / capacity = useful / received  x  received / sent  x  sent / capacity
                         data factor           routing factor     port factor

*Useful* is the first copy of a token at a rank. *Received* counts every row at the rank that computes it, *sent* every
row at every port it leaves. *Capacity* is the time until the busiest port is done, in either direction, times the
rates of all ports. A plan that changes one factor changes the others. A low port factor means uneven ranks: replicas
help. A low data factor means tokens sent twice: send once. A low routing factor means detours: locality helps.

A rank has two ports: its link into the node and its share of the network. Networks of rails join ranks of the same
number: a row for a rank of another number goes to the rank of the sender's number on that node, which forwards it.
With hierarchical dispatch a token enters a node once, at that rank, which forwards it to those that compute for it; the
stage inside follows the one between nodes, so capacity counts the busiest port of each.
Gathering all tokens sends each to every rank; a row that no expert of its rank needs counts as a duplicate.
Combine and backward pass reverse these paths: their factors are the same if links are as fast in both directions.
Latencies are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.planning.traffic.relays import rows_to_nodes, stage_rows
from relibra.planning.traffic.traffic import BETWEEN, IN, INSIDE, OUT, iterate_traffic, send_once_share
from relibra.routing.demand import ScheduledDemand

ROUNDING = 1e-12
"""A difference of two sums of received bytes below this share of them is noise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteLedger:
    """Bytes of the forward dispatches of a step between ranks, per layer, over all micro-batches.

    useful_L      the first copy of each token at each rank
    duplicate_L   further copies of a token at the same rank, and rows that the rank does not need
    forwarded_L   bytes sent again by an intermediate rank
    capacity_L    bytes that all ports could send until the busiest one is done
    exact         useful bytes were counted token by token; False: bounded from below by pairs of experts chosen
                  together, or without pairs all rows count
    """

    useful_L: Float64[ndarray, " L"]
    duplicate_L: Float64[ndarray, " L"]
    forwarded_L: Float64[ndarray, " L"]
    capacity_L: Float64[ndarray, " L"]
    exact: bool

    @property
    def data_factor_L(self) -> Float64[ndarray, " L"]:
        """Return useful / received; 1 without traffic."""
        return _ratio(self.useful_L, self.useful_L + self.duplicate_L)

    @property
    def routing_factor_L(self) -> Float64[ndarray, " L"]:
        """Return received / bytes sent by all ports; 1 without traffic."""
        received_L = self.useful_L + self.duplicate_L
        return _ratio(received_L, received_L + self.forwarded_L)

    @property
    def port_factor_L(self) -> Float64[ndarray, " L"]:
        """Return bytes sent by all ports / capacity; 1 without traffic."""
        return _ratio(self.useful_L + self.duplicate_L + self.forwarded_L, self.capacity_L)

    @property
    def efficiency_L(self) -> Float64[ndarray, " L"]:
        """Return useful / capacity, the product of the three factors."""
        return _ratio(self.useful_L, self.capacity_L)

    def total(self) -> ByteLedger:
        """Return the ledger of all layers: they run one after the other, so bytes and capacities add up."""
        names = ("useful_L", "duplicate_L", "forwarded_L", "capacity_L")
        return ByteLedger(
            **{name: np.array([getattr(self, name).sum()], dtype=np.float64) for name in names}, exact=self.exact
        )


def byte_ledger(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    row_bytes: int,
    *,
    distinct: DistinctRows | None = None,
    send_once: bool = False,
    gathered: DistinctRows | None = None,
) -> ByteLedger:
    """Return the bytes of a plan's dispatches.

    demand      with the schedule of the plan
    row_bytes   bytes of one row (`ExpertShape.row_bytes`)
    distinct    tokens that each source sends to each rank and node, for exact figures; None: bounded from below by
                `demand.pairs_LEE`, and without pairs every row counts as useful
    send_once   a token is sent to a rank once, and with the plan's hierarchical dispatch to a node once, as in the
                executor: no duplicates. False: each choice by itself, straight to its rank
    gathered    rows that travel instead of those of the plan, straight to their ranks
    """
    L, R, N = len(plan.layer_ids), plan.num_ranks, plan.num_nodes
    share_LR, share_LN = np.ones((L, R)), np.ones((L, N))
    if demand.pairs_LEE is not None:
        share_LR = send_once_share(demand.pairs_LEE, plan.home_LE, R)
        share_LN = send_once_share(demand.pairs_LEE, plan.home_LE // plan.ranks_per_node, N)
    away_RR, in_stages = ~np.eye(R, dtype=bool), send_once and plan.dispatch == "hierarchical"
    useful_L, received_L, sent_L, seconds_L = (np.zeros(L) for _ in range(4))
    for m, layers, traffic_LRR in iterate_traffic(plan, demand):
        every_LRR = traffic_LRR * away_RR
        if distinct is None:
            once_LRR = every_LRR * share_LR[layers][:, None]
        else:
            once_LRR = distinct.ranks_MLRR[m, layers] * away_RR
        rows_LRR = once_LRR if send_once else every_LRR
        if gathered is not None:
            rows_LRR = gathered.ranks_MLRR[m, layers] * away_RR
        if not in_stages:
            nodes_LRN = rows_LRR.reshape(len(rows_LRR), R, N, -1).sum(axis=3)
        elif distinct is None:
            nodes_LRN = rows_to_nodes(traffic_LRR, once_LRR, share_LN[layers])
        else:
            nodes_LRN = distinct.nodes_MLRN[m, layers]
        bytes_2L2R = stage_rows(rows_LRR, nodes_LRN)[0] * float(row_bytes)
        useful_L[layers] += once_LRR.sum(axis=(1, 2)) * float(row_bytes)
        received_L[layers] += rows_LRR.sum(axis=(1, 2)) * float(row_bytes)
        sent_L[layers] += bytes_2L2R[:, :, OUT].sum(axis=(0, 2))
        seconds_L[layers] += _busiest_seconds(bytes_2L2R, cluster, in_stages=in_stages)
    return ByteLedger(
        useful_L=useful_L,
        duplicate_L=_beyond(received_L, useful_L),
        forwarded_L=_beyond(sent_L, received_L),
        capacity_L=seconds_L * port_bytes_per_second(cluster),
        exact=distinct is not None or demand.top_k == 1,
    )


def port_bytes_per_second(cluster: Cluster) -> float:
    """Return the bytes per second of all ports of all ranks; a single node has no network."""
    network = cluster.inter_send.bytes_per_second if cluster.num_nodes > 1 else 0.0
    return cluster.num_ranks * (cluster.intra.bytes_per_second + network)


def _busiest_seconds(
    bytes_2L2R: Float64[ndarray, "2 L 2 R"], cluster: Cluster, *, in_stages: bool
) -> Float64[ndarray, " L"]:
    """Return the seconds of the busiest port: of both stages together, or one after the other."""
    between_L2 = bytes_2L2R[BETWEEN].max(axis=2)
    inside_L = bytes_2L2R[INSIDE].max(axis=(1, 2)) / cluster.intra.bytes_per_second
    between_L = np.maximum(
        between_L2[:, OUT] / cluster.inter_send.bytes_per_second,
        between_L2[:, IN] / cluster.inter_receive.bytes_per_second,
    )
    return between_L + inside_L if in_stages else np.maximum(between_L, inside_L)


def _beyond(whole_L: Float64[ndarray, " L"], part_L: Float64[ndarray, " L"]) -> Float64[ndarray, " L"]:
    """Return whole - part; 0 where the difference is rounding only, as both sum rows in different orders."""
    return np.where(whole_L - part_L > ROUNDING * whole_L, whole_L - part_L, 0.0)


def _ratio(part_L: Float64[ndarray, " L"], whole_L: Float64[ndarray, " L"]) -> Float64[ndarray, " L"]:
    return np.divide(part_L, whole_L, out=np.ones(len(part_L)), where=whole_L > 0)
