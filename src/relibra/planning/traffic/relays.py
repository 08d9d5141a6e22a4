"""Rows of hierarchical dispatch: first between nodes, once per (token, node), then inside them to ranks that compute.

The relay of rank (node n, number g) in another node n' is rank (n', g): it gets once each token that ranks
of its node compute, and forwards it to them. Inside their own node ranks send directly, in the second stage.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from numpy import ndarray

from relibra.planning.traffic.traffic import BETWEEN, IN, INSIDE, OUT
from relibra.routing.compiled import compiled


def rows_to_nodes(
    traffic_LRR: Int64[ndarray, "L R R2"], rows_LRR: Float64[ndarray, "L R R2"], share_LN: Float64[ndarray, "L N"]
) -> Float64[ndarray, "L R N"]:
    """Return the distinct tokens that each rank sends to each node, estimated from a share of its token-slots there.

    At least as many as go to one of its ranks, and at most as many as go to all of them.

    rows_LRR   distinct tokens that each rank sends to each rank
    share_LN   distinct tokens per token-slot that a node receives (`send_once_share`, given nodes instead of ranks)
    """
    L, R, _ = traffic_LRR.shape
    by_node = (L, R, share_LN.shape[1], -1)
    slots_LRN = traffic_LRR.reshape(by_node).sum(axis=3)
    rows_LRNG = rows_LRR.reshape(by_node)
    return np.clip(slots_LRN * share_LN[:, None], rows_LRNG.max(axis=3), rows_LRNG.sum(axis=3))


def stage_rows(
    rows_LRR: Shaped[ndarray, "L R R2"], nodes_LRN: Shaped[ndarray, "L R N"]
) -> tuple[Float64[ndarray, "2 L 2 R"], Int64[ndarray, "2 L 2 R"]]:
    """Return the rows that leave and enter each rank in each stage, and how many other ranks these go to and come from.

    rows_LRR    distinct tokens that each rank sends to each rank
    nodes_LRN   distinct tokens that each rank sends to each node
    returns     each [inside nodes or between them, layer, out or in, rank], as `link_rows` has it
    """
    L, R, _ = nodes_LRN.shape
    rows_2L2R, peers_2L2R = np.zeros((2, L, 2, R)), np.zeros((2, L, 2, R), dtype=np.int64)
    _sum_stages(rows_LRR.astype(np.float64), nodes_LRN.astype(np.float64), rows_2L2R, peers_2L2R)
    return rows_2L2R, peers_2L2R


@compiled
@no_type_check
def _sum_stages(rows_LRR, nodes_LRN, rows_2L2R, peers_2L2R) -> None:
    L, R, N = nodes_LRN.shape
    G = R // N
    for layer in range(L):
        for s in range(R):
            for n in range(N):
                rows, relay = nodes_LRN[layer, s, n], n * G + s % G
                if rows > 0 and s // G != n:
                    rows_2L2R[BETWEEN, layer, OUT, s] += rows
                    rows_2L2R[BETWEEN, layer, IN, relay] += rows
                    peers_2L2R[BETWEEN, layer, OUT, s] += 1
                    peers_2L2R[BETWEEN, layer, IN, relay] += 1
        for relay in range(R):
            first = relay // G * G
            for d in range(first, first + G):
                if d == relay:
                    continue
                rows = 0.0
                for n in range(N):  # its own tokens, and those of the ranks that it is the relay of
                    rows += rows_LRR[layer, n * G + relay % G, d]
                if rows > 0:
                    rows_2L2R[INSIDE, layer, OUT, relay] += rows
                    rows_2L2R[INSIDE, layer, IN, d] += rows
                    peers_2L2R[INSIDE, layer, OUT, relay] += 1
                    peers_2L2R[INSIDE, layer, IN, d] += 1
