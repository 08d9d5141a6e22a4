"""Traffic of the exchanges: rows on every link, from the token split of a plan.

A token is sent to a rank once, for all of its experts there: `send_once_share` bounds such rows from co-routing pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.planning.placement import Placement
from relibra.planning.traffic.split import traffic_MLRR
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

INSIDE, BETWEEN = 0, 1
"""Links inside a node and between nodes, in `link_rows`."""

OUT, IN = 0, 1
"""Directions in `link_rows`."""

_TRAFFIC_BYTES = 64 << 20
"""Most bytes of a traffic array (layers x source ranks x destination ranks) in memory."""


def iterate_traffic(
    plan: Placement, demand: ScheduledDemand, micro_batches: Iterable[int] | None = None
) -> Iterator[tuple[int, slice, Int64[ndarray, "L R R2"]]]:
    """Yield the traffic of micro-batches (None: all): each time of one, for a bounded number of its layers."""
    M, L, R, _ = demand.tokens_MLRE.shape
    at_once = max(1, _TRAFFIC_BYTES // (8 * R * R))
    for m in range(M) if micro_batches is None else micro_batches:
        for start in range(0, L, at_once):
            layers = slice(start, min(L, start + at_once))
            cut = (slice(m, m + 1), layers)
            arrays = (demand.tokens_MLRE[cut], plan.home_LE[layers], plan.replica_MLRB[cut], plan.quota_MLRB[cut])
            yield m, layers, traffic_MLRR(*arrays, plan.ranks_per_node)[0]


def link_rows(
    traffic_LRR: Int64[ndarray, "L R R2"], share_LR: Float64[ndarray, "L R"], ranks_per_node: int
) -> tuple[Float64[ndarray, "2 L 2 R"], Float64[ndarray, "2 L 2 R"], Int64[ndarray, "2 L 2 R"]]:
    """Return the rows that leave and enter each rank by link; rows that stay on a rank use none.

    share_LR   rows per token-slot at the destination rank
    returns    rows, token-slots, and peers (other ranks with any), each [inside a node or between nodes, layer, out or
               in, rank]
    """
    L, R, _ = traffic_LRR.shape
    rows_2L2R, slots_2L2R = np.zeros((2, L, 2, R)), np.zeros((2, L, 2, R))
    peers_2L2R = np.zeros((2, L, 2, R), dtype=np.int64)
    _sum_links(traffic_LRR, share_LR, ranks_per_node, rows_2L2R, slots_2L2R, peers_2L2R)
    return rows_2L2R, slots_2L2R, peers_2L2R


@compiled
@no_type_check
def _sum_links(traffic_LRR, share_LR, ranks_per_node, rows_2L2R, slots_2L2R, peers_2L2R) -> None:
    L, R, _ = traffic_LRR.shape
    for layer in range(L):
        for s in range(R):
            for x in range(0, R, ranks_per_node):
                link = INSIDE if x <= s < x + ranks_per_node else BETWEEN
                for d in range(x, min(x + ranks_per_node, R)):
                    slots = traffic_LRR[layer, s, d]
                    if slots > 0 and s != d:
                        rows = slots * share_LR[layer, d]
                        rows_2L2R[link, layer, OUT, s] += rows
                        rows_2L2R[link, layer, IN, d] += rows
                        slots_2L2R[link, layer, OUT, s] += slots
                        slots_2L2R[link, layer, IN, d] += slots
                        peers_2L2R[link, layer, OUT, s] += 1
                        peers_2L2R[link, layer, IN, d] += 1


def send_once_share(
    pairs_LEE: Int[ndarray, "L E E2"], home_LE: Int[ndarray, "L E"], num_ranks: int
) -> Float64[ndarray, "L R"]:
    """Return a lower bound of the distinct tokens a rank receives, as a share of its token-slots; 1 where it has none.

    For the events "token picks e", e at home on the rank, with n_e tokens each and n_ef in common, the union holds at
    least sum_e n_e^2 / sum_f n_ef tokens (de Caen 1997), out of sum_e n_e token-slots. Exact for disjoint and for equal
    events. Replicas take the share of the rank they are on.
    """
    L, E = home_LE.shape
    share_LR = np.ones((L, num_ranks))
    for layer in range(L):
        same_EE = home_LE[layer][:, None] == home_LE[layer][None, :]
        tokens_E = np.diagonal(pairs_LEE[layer]).astype(np.float64)
        common_E = np.where(same_EE, pairs_LEE[layer], 0).sum(axis=1, dtype=np.float64)
        union_E = np.divide(tokens_E**2, common_E, out=np.zeros(E), where=common_E > 0)
        union_R = np.bincount(home_LE[layer], union_E, minlength=num_ranks)
        slots_R = np.bincount(home_LE[layer], tokens_E, minlength=num_ranks)
        np.divide(union_R, slots_R, out=share_LR[layer], where=slots_R > 0)
    return share_LR
