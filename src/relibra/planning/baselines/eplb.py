"""EPLB, the expert-parallel load balancer of DeepSeek (github.com/deepseek-ai/EPLB, d52c72d).

Plans from expert totals, once in a while: replicas for the experts with the largest load per copy, then longest-first
packing; homes move freely, replicas stay, tokens are shared evenly by the copies. Sums are taken in float32 as in the
original, so that placements are equal in every slot, except where loads are equal: ties go to the lower id here, in
the original as torch's sort leaves them. Two copies of an expert may be on one rank.
As a balancer it runs in global mode: experts have no groups here, and one group divides over one node only.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int64, Shaped
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.baselines.from_physical import placement_from_physical
from relibra.planning.placement import Placement
from relibra.routing.compiled import compiled


def decide(request: PlacementRequest) -> Placement:
    """Place by EPLB from `total_LE`, and share the tokens of every micro-batch evenly over the copies."""
    return placement_from_physical(request, eplb_layers(request), "even")


def decide_optimal(request: PlacementRequest) -> Placement:
    """Place by EPLB from `total_LE` and split each micro-batch so that its busiest rank is as low as possible.

    The best that any dispatcher can do with those copies, after LPLB, MicroMoE (arXiv 2511.16947) and SGLang's `lp`
    dispatch. Here it is exact and in integers; theirs are approximate or fractional.
    """
    return placement_from_physical(request, eplb_layers(request), "optimal")


def eplb_layers(request: PlacementRequest) -> Int64[ndarray, "L R P"]:
    """Return EPLB's placement of every layer: the expert in each of the P = E / R + B slots of a rank."""
    L, E = request.total_LE.shape
    R = request.cluster.num_ranks
    num_replicas = E + R * request.slots
    layers = [eplb_placement(weight_E, num_replicas, 1, 1, R)[0] for weight_E in request.total_LE]
    return np.array(layers, dtype=np.int64).reshape(L, R, num_replicas // R)


def eplb_placement(
    weight_E: Shaped[ndarray, " E"], num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[Int64[ndarray, " P"], Int64[ndarray, " P"]]:
    """Place one layer; hierarchical where nodes divide the groups, else with one group on one node.

    weight_E   load of each expert, any unit
    returns    the expert of each physical slot, and which copy of it this is (0 first)
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    E = len(weight_E)
    weight_E = weight_E.astype(np.float32)
    by_node = experts_by_node(weight_E, num_groups, num_nodes)
    expert_P, copy_P = np.empty(num_replicas, np.int64), np.empty(num_replicas, np.int64)
    per_node = num_replicas // num_nodes
    for node in range(num_nodes):
        here = by_node[node * (E // num_nodes) : (node + 1) * (E // num_nodes)]
        local_X, copy_X, count_E = give_copies(weight_E[here], per_node, np.full(len(here), per_node))
        share_X = (weight_E[here] / count_E.astype(np.float32))[local_X]
        order = pack_order(share_X, num_ranks // num_nodes)
        expert_P[node * per_node : (node + 1) * per_node] = here[local_X[order]]
        copy_P[node * per_node : (node + 1) * per_node] = copy_X[order]
    return expert_P, copy_P


def experts_by_node(weight_E: ndarray, num_groups: int, num_nodes: int) -> Int64[ndarray, " E"]:
    """Pack expert groups onto nodes and list the experts node by node."""
    size = len(weight_E) // num_groups
    weight_X = weight_E.reshape(num_groups, size).sum(axis=1, dtype=np.float32)
    return (pack_order(weight_X, num_nodes)[:, None] * size + np.arange(size)).ravel()


def pack_order(weight_X: ndarray, num_packs: int) -> Int64[ndarray, " X"]:
    """Deal items, heaviest first, to the lightest pack with room, and list them pack by pack as they came in.

    One item per pack: the identity, as in the original, which balances nothing then.
    """
    per_pack = len(weight_X) // num_packs
    if per_pack == 1:
        return np.arange(len(weight_X))
    order = np.argsort(-weight_X, kind="stable")
    return _deal(weight_X, order, num_packs, per_pack)


@compiled
@no_type_check
def _deal(weight_X, order, num_packs, per_pack) -> ndarray:
    packed, filled, total = (
        np.empty((num_packs, per_pack), np.int64),
        np.zeros(num_packs, np.int64),
        np.zeros(num_packs, weight_X.dtype),
    )
    for x in order:
        best = -1
        for p in range(num_packs):
            if filled[p] < per_pack and (best < 0 or total[p] < total[best]):
                best = p
        packed[best, filled[best]] = x
        filled[best] += 1
        total[best] += weight_X[x]
    return packed.ravel()


@compiled
@no_type_check
def give_copies(weight_E, num_slots, most_E) -> tuple[ndarray, ndarray, ndarray]:
    """Give every expert one slot, then each further slot to most load per copy (ties: lower id).

    most_E     most copies of each expert; slots that are left when all experts have their most get expert -1
    returns    expert of each slot, which copy of it this is, copies of each expert
    """
    E = len(weight_E)
    expert_X, copy_X, count_E = np.empty(num_slots, np.int64), np.zeros(num_slots, np.int64), np.ones(E, np.int64)
    for x in range(num_slots):
        best = x
        if x >= E:
            best = -1
            for e in range(E):
                if count_E[e] < most_E[e] and (
                    best < 0 or weight_E[e] / np.float32(count_E[e]) > weight_E[best] / np.float32(count_E[best])
                ):
                    best = e
            if best >= 0:
                copy_X[x] = count_E[best]
                count_E[best] += 1
        expert_X[x] = best
    return expert_X, copy_X, count_E
