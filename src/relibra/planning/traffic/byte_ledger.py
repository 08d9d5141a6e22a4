"""The byte ledger: useful, duplicate and forwarded bytes of dispatches.

Switching Efficiency (arXiv 2604.14690) splits the used share of a network's capacity into three factors:

    useful / capacity = useful / received  x  received / forwarded  x  forwarded / capacity
                        data factor           routing factor           port factor

*Useful* is the first copy of a token at a rank. *Received* counts every row at the rank that computes it, *forwarded*
every row at every port it leaves. *Capacity* is the time until the busiest port is done, in either direction, times the
rates of all ports. A plan that changes one factor changes the others. Low port: uneven ranks (replicas help); low data:
tokens sent twice (send once); low routing: detours (locality).

Ports are the link of a rank into its node and, between nodes, its share of the network. Networks of rails join ranks of
equal number on their nodes: a row for another number is forwarded inside the destination node, its second port.
Combine and backward pass reverse these paths: their factors are the same if links are as fast in both directions.
Latencies are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64, Shaped
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.plan import StepPlan
from relibra.planning.search.parallel_map import parallel_map
from relibra.planning.traffic.split import TokenSplit, split_tokens
from relibra.planning.traffic.traffic import iterate_traffic, send_once_share
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

MAX_PAIRS = 1 << 26
"""Most entries of the tables of distinct rows; for larger steps callers use bounds instead of exact counts."""


ROUNDING = 1e-12
"""Share of the bytes received below which a difference of two sums of them is noise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteLedger:
    """Bytes of the forward dispatches of a step between ranks, per layer, over all micro-batches.

    useful_L      the first copy of each token at each rank
    duplicate_L   further copies of it there
    forwarded_L   bytes sent again by an intermediate rank
    capacity_L    bytes that all ports could send until the busiest one is done
    exact         useful bytes were counted token by token; False: bounded from below by co-routing pairs
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
    distinct_MLRR: Int32[ndarray, "M L R R2"] | None = None,
    send_once: bool = False,
) -> ByteLedger:
    """Return the bytes of a plan's dispatches.

    demand          with the schedule of the plan
    row_bytes       bytes of one row (`ExpertShape.row_bytes`)
    distinct_MLRR   tokens that each source sends to each rank (`distinct_rows`), for exact figures; None: bounded from
                    below by `demand.pairs_LEE`, and without pairs every row counts as useful
    send_once       a token is sent to a rank once, as in the executor: no duplicates
    """
    L, R = len(plan.layer_ids), plan.num_ranks
    share_LR = np.ones((L, R))
    if demand.pairs_LEE is not None:
        share_LR = send_once_share(demand.pairs_LEE, plan.home_LE, R)
    away_RR = ~np.eye(R, dtype=bool)
    useful_L, received_L, forwarded_L, seconds_L = (np.zeros(L) for _ in range(4))
    for m, layers, traffic_LRR in iterate_traffic(plan, demand):
        sent_LRR = traffic_LRR * away_RR
        if distinct_MLRR is None:
            once_LRR = sent_LRR * share_LR[layers][:, None]
        else:
            once_LRR = distinct_MLRR[m, layers] * away_RR
        received, forwarded, seconds = _dispatch(once_LRR if send_once else sent_LRR, cluster, row_bytes)
        useful_L[layers] += once_LRR.sum(axis=(1, 2)) * float(row_bytes)
        received_L[layers] += received
        forwarded_L[layers] += forwarded
        seconds_L[layers] += seconds
    exact = distinct_MLRR is not None or demand.top_k == 1
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


def distinct_rows(
    experts_TK: Shaped[ndarray, "T K"], source_T: Int[ndarray, " T"], split: TokenSplit, num_ranks: int
) -> Int64[ndarray, "R R2"]:
    """Return distinct (token, destination) pairs by source rank, in one (micro-batch, layer).

    experts_TK   choices of the tokens, in the order of the trace
    source_T     rank that each token is fed from
    split        `split_tokens` of the same tokens
    """
    starts_E1 = np.searchsorted(split.expert_I, np.arange(int(split.expert_I.max(initial=-1)) + 2))
    distinct_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    left_RI = split.tokens_RI.copy()
    _count_distinct(
        experts_TK.astype(np.int64), source_T.astype(np.int64), starts_E1, split.rank_I, left_RI, distinct_RR
    )
    return distinct_RR


@compiled
@no_type_check
def _count_distinct(experts_TK, source_T, starts_E1, rank_I, left_RI, distinct_RR) -> None:
    T, K = experts_TK.shape
    last_R = np.full(len(distinct_RR), -1, np.int64)
    for t in range(T):
        s = source_T[t]
        for k in range(K):
            i = starts_E1[experts_TK[t, k]]
            while left_RI[s, i] == 0:  # the first instance with room; margins are exact, so there is one
                i += 1
            left_RI[s, i] -= 1
            if last_R[rank_I[i]] != t:
                last_R[rank_I[i]] = t
                distinct_RR[s, rank_I[i]] += 1


def distinct_rows_of_step(
    plan: StepPlan,
    demand: ScheduledDemand,
    experts_TLK: Shaped[ndarray, "T L K"],
    sample_T: Int[ndarray, " T"],
    *,
    threads: int = 1,
) -> Int32[ndarray, "M L R R2"]:
    """Return distinct (token, destination) pairs by source rank, in every micro-batch and layer of a plan.

    demand        with the schedule of the plan
    experts_TLK   choices of the tokens, in the order of the trace
    sample_T      position of each token's sample in the demand; -1: in none (`demand_rows.sample_of_rows`)
    """
    M, L, R, _ = demand.tokens_MLRE.shape
    micro_batch_T = np.where(sample_T >= 0, demand.micro_batch_S[sample_T], -1)
    distinct_MLRR = np.zeros((M, L, R, R), dtype=np.int32)
    tokens_MLRE = demand.tokens_MLRE

    def count(m: int) -> None:
        rows = np.flatnonzero(micro_batch_T == m)
        source_t = demand.rank_S[sample_T[rows]]
        for layer in range(L):
            at = (m, layer)
            arrays = (tokens_MLRE[at], plan.home_LE[layer], plan.replica_MLRB[at], plan.quota_MLRB[at])
            split = split_tokens(*arrays, plan.ranks_per_node)
            distinct_MLRR[at] = distinct_rows(experts_TLK[rows, layer], source_t, split, R)

    parallel_map(count, M, threads)
    return distinct_MLRR


def _ratio(part_L: Float64[ndarray, " L"], whole_L: Float64[ndarray, " L"]) -> Float64[ndarray, " L"]:
    return np.divide(part_L, whole_L, out=np.ones(len(part_L)), where=whole_L > 0)
