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
Combine and backward pass reverse these paths: their factors are the same if links are as fast in both directions.
Latencies are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Shaped
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
    duplicate_L   further copies of it there
    forwarded_L   bytes sent again by an intermediate rank
    capacity_L    bytes that all ports could send until the busiest one is done
    exact         useful bytes were counted token by token; False: a lower bound from pairs of experts chosen together
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
) -> ByteLedger:
    """Return the bytes of a plan's dispatches.

    demand      with the schedule of the plan
    row_bytes   bytes of one row (`ExpertShape.row_bytes`)
    distinct    tokens that each source sends to each rank and node, for exact figures; None: bounded from below by
                `demand.pairs_LEE`, and without pairs every row counts as useful
    send_once   a token is sent to a rank once, and with the plan's hierarchical dispatch to a node once, as in the
                executor: no duplicates. False: each choice by itself, straight to its rank
    """
    L, R = len(plan.layer_ids), plan.num_ranks
    share_LR, share_LN = np.ones((L, R)), np.ones((L, plan.num_nodes))
    if demand.pairs_LEE is not None:
        share_LR = send_once_share(demand.pairs_LEE, plan.home_LE, R)
        share_LN = send_once_share(demand.pairs_LEE, plan.home_LE // plan.ranks_per_node, plan.num_nodes)
    away_RR = ~np.eye(R, dtype=bool)
    useful_L, received_L, forwarded_L, seconds_L = (np.zeros(L) for _ in range(4))
    for m, layers, traffic_LRR in iterate_traffic(plan, demand):
        sent_LRR = traffic_LRR * away_RR
        if distinct is None:
            once_LRR = sent_LRR * share_LR[layers][:, None]
        else:
            once_LRR = distinct.ranks_MLRR[m, layers] * away_RR
        if send_once and plan.dispatch == "hierarchical":
            if distinct is None:
                nodes_LRN = rows_to_nodes(traffic_LRR, once_LRR, share_LN[layers])
            else:
                nodes_LRN = distinct.nodes_MLRN[m, layers]
            received, forwarded, seconds = _dispatch_in_stages(once_LRR, nodes_LRN, cluster, row_bytes)
        else:
            received, forwarded, seconds = _dispatch(once_LRR if send_once else sent_LRR, cluster, row_bytes)
        useful_L[layers] += once_LRR.sum(axis=(1, 2)) * float(row_bytes)
        received_L[layers] += received
        forwarded_L[layers] += forwarded
        seconds_L[layers] += seconds
    exact = distinct is not None or demand.top_k == 1
    duplicate_L = received_L - useful_L
    duplicate_L[np.abs(duplicate_L) <= ROUNDING * received_L] = 0.0  # sums of the same rows in another order
    return ByteLedger(
        useful_L=useful_L,
        duplicate_L=duplicate_L,
        forwarded_L=forwarded_L,
        capacity_L=seconds_L * port_bytes_per_second(cluster),
        exact=exact,
    )


def port_bytes_per_second(cluster: Cluster) -> float:
    """Return the bytes per second of all ports of all ranks; a single node has no network."""
    network = cluster.inter_send.bytes_per_second if cluster.num_nodes > 1 else 0.0
    return cluster.num_ranks * (cluster.intra.bytes_per_second + network)


def _dispatch(
    rows_LRR: Shaped[ndarray, "L R R2"], cluster: Cluster, row_bytes: int
) -> tuple[Float64[ndarray, " L"], Float64[ndarray, " L"], Float64[ndarray, " L"]]:
    """Return received and forwarded bytes of a dispatch, and the seconds of its busiest port."""
    N, G = cluster.num_nodes, cluster.ranks_per_node
    bytes_LNGNG = rows_LRR.reshape(-1, N, G, N, G) * float(row_bytes)
    n = np.arange(N)
    inside_LNGG = bytes_LNGNG[:, n, :, n, :].transpose(1, 0, 2, 3)
    bytes_LNGNG[:, n, :, n, :] = 0  # the rest crosses the network
    handed_LNGG = bytes_LNGNG.sum(axis=1).transpose(
        0, 2, 1, 3
    )  # node, number of the entry rank, number of the destination
    handed_LNGG[:, :, np.arange(G), np.arange(G)] = 0
    carried_LNGG = inside_LNGG + handed_LNGG
    ports = (
        (carried_LNGG.sum(axis=3), cluster.intra),
        (carried_LNGG.sum(axis=2), cluster.intra),
        (bytes_LNGNG.sum(axis=(3, 4)), cluster.inter_send),
        (bytes_LNGNG.sum(axis=(1, 4)), cluster.inter_receive),
    )
    seconds_L = np.max([port_L.max(axis=(1, 2)) / link.bytes_per_second for port_L, link in ports], axis=0)
    return (
        inside_LNGG.sum(axis=(1, 2, 3)) + bytes_LNGNG.sum(axis=(1, 2, 3, 4)),
        handed_LNGG.sum(axis=(1, 2, 3)),
        seconds_L,
    )


def _dispatch_in_stages(
    once_LRR: Shaped[ndarray, "L R R2"], nodes_LRN: Shaped[ndarray, "L R N"], cluster: Cluster, row_bytes: int
) -> tuple[Float64[ndarray, " L"], Float64[ndarray, " L"], Float64[ndarray, " L"]]:
    """Do the same for hierarchical dispatch.

    Forwarded rows are those that a relay gets and does not compute: what ports send beyond what is received.
    """
    bytes_2L2R = stage_rows(once_LRR, nodes_LRN)[0] * float(row_bytes)
    received_L = once_LRR.sum(axis=(1, 2)) * float(row_bytes)
    forwarded_L = np.maximum(0.0, bytes_2L2R[:, :, OUT].sum(axis=(0, 2)) - received_L)
    between_L2R, inside_L2R = bytes_2L2R[BETWEEN], bytes_2L2R[INSIDE]
    send, receive = (
        between_L2R[:, way].max(axis=1) / link.bytes_per_second
        for way, link in ((OUT, cluster.inter_send), (IN, cluster.inter_receive))
    )
    inside_L = inside_L2R.max(axis=(1, 2)) / cluster.intra.bytes_per_second
    return received_L, forwarded_L, np.maximum(send, receive) + inside_L


def _ratio(part_L: Float64[ndarray, " L"], whole_L: Float64[ndarray, " L"]) -> Float64[ndarray, " L"]:
    return np.divide(part_L, whole_L, out=np.ones(len(part_L)), where=whole_L > 0)
