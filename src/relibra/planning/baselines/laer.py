"""LAER-MoE (arXiv 2602.11686; github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe, 2704237): a new layout every step.

The original shards every expert over all ranks and rebuilds the experts of a layout before each layer, so any layout
costs the same; it plans from the counts of past iterations. Candidates for the replica counts are placed greedily and
the one with the least communication + compute is kept; tokens go to copies on the own node, if there are any.
Different from the original: the history has no source ranks, so sources are taken as equal; bandwidths and flops are
those of the given cluster; each expert has one home, as everywhere in relibra.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.physical_placement import count_copies
from relibra.planning.baselines.from_physical import placement_from_physical
from relibra.planning.placement import Placement


def decide(request: PlacementRequest) -> Placement:
    """Keep the cheapest layout of every layer, and share tokens on the own node first."""
    cluster = request.cluster
    R, N = cluster.num_ranks, cluster.num_nodes
    L, E = request.total_LE.shape
    per_rank = E // R + request.slots
    placement_LRP = np.empty((L, R, per_rank), dtype=np.int64)
    for layer, total_E in enumerate(request.total_LE):
        candidates = [greedy_counts(total_E, R * per_rank, N)]
        if R * per_rank % E == 0:
            candidates.insert(0, np.full(E, R * per_rank // E))
        placements = [greedy_placement(total_E, count_E, R, per_rank, N) for count_E in candidates]
        placement_LRP[layer] = min(placements, key=lambda placement_RP: _seconds(request, total_E, placement_RP))
    return placement_from_physical(request, placement_LRP, "local first")


def greedy_counts(load_E: Float64[ndarray, " E"], num_slots: int, num_nodes: int) -> Int64[ndarray, " E"]:
    """Return copies per expert: that with most load per copy gets a slot, or N once it has N = `num_nodes` copies."""
    E = len(load_E)
    count_E = np.full(E, num_nodes if num_nodes * E <= num_slots else 1)
    left = num_slots - int(count_E.sum())
    while left:
        e = int(np.argmax(load_E / count_E))
        step = min(left, num_nodes if count_E[e] >= num_nodes else 1)
        count_E[e] += step
        left -= step
    return count_E


def greedy_placement(
    load_E: Float64[ndarray, " E"], count_E: Int64[ndarray, " E"], num_ranks: int, per_rank: int, num_nodes: int
) -> Int64[ndarray, "R P"]:
    """Lay copies, by falling load, on the least loaded free rank among the nodes with fewest copies of the expert."""
    G = num_ranks // num_nodes
    share_E = load_E / count_E
    copies_N = np.zeros(num_nodes, dtype=np.int64)
    filled_R, total_R = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
    placement_RP = np.full((num_ranks, per_rank), -1, dtype=np.int64)
    for e in np.argsort(-share_E, kind="stable"):
        copies_N[:] = 0
        for _ in range(count_E[e]):
            free_N = (filled_R < per_rank).reshape(num_nodes, G).any(axis=1)
            fewest_N = free_N & (copies_N == copies_N[free_N].min())
            open_R = np.repeat(fewest_N, G) & (filled_R < per_rank)
            rank = int(np.argmin(np.where(open_R, total_R, np.inf)))
            placement_RP[rank, filled_R[rank]] = e
            filled_R[rank] += 1
            total_R[rank] += share_E[e]
            copies_N[rank // G] += 1
    return placement_RP


def _seconds(request: PlacementRequest, load_E: Float64[ndarray, " E"], placement_RP: Int64[ndarray, "R P"]) -> float:
    """Return 4 x the sum over sources of bytes / bandwidth + 3 x the busiest rank's compute, with equal sources."""
    cluster, expert = request.cluster, request.expert
    N, G = cluster.num_nodes, cluster.ranks_per_node
    copies_RE = count_copies(placement_RP, len(load_E))
    copies_NE = copies_RE.reshape(N, G, -1).sum(axis=1)
    total_E = np.maximum(1, copies_RE.sum(axis=0))
    # each node sends load / N of an expert: to its own copies evenly, else to all copies evenly
    local_NE = copies_NE > 0
    inside_RE = np.repeat(local_NE / np.maximum(1, copies_NE), G, axis=0) * copies_RE
    outside_E = (~local_NE).sum(axis=0) / total_E
    received_RE = (inside_RE + outside_E * copies_RE) * load_E / N
    same_rank = float((inside_RE * load_E / N).sum()) / G
    within = float((local_NE.sum(axis=0) * load_E / N).sum()) - same_rank
    across = float(((~local_NE).sum(axis=0) * load_E / N).sum())
    network = min(cluster.inter_send.bytes_per_second, cluster.inter_receive.bytes_per_second)
    exchange = expert.row_bytes * (within / cluster.intra.bytes_per_second + across / network)
    compute = float(received_RE.sum(axis=1).max()) * expert.flops_per_token_slot / cluster.flops_per_second
    return 4 * exchange + 3 * compute
