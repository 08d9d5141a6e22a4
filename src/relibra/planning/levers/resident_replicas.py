"""Resident replicas: they stay in slots of their layer over micro-batches; only the split of token-slots changes.

All micro-batches are known, so a few replicas per layer serve most of them. In each micro-batch, in order:

1. Token-slots are split over homes and replicas down to a ceiling (`planning.levers.instance_flow`). Usually that is
   enough, and nothing is sent.
2. Else one of the experts on the closed ranks (`Instances.closed_R`) needs a replica on another rank. The best
   addition takes most token-slots now and in later micro-batches, and evicts least; then token-slots are split again.
3. If that does not reach the ceiling either, chains choose anew, with a bonus for experts that are there already.

The cheaper of 2 and 3 is kept. Cost: the load of the busiest rank, and `_PUSH_PRICE` for each new replica.

Some slots may be for *traffic*: they hold, for a whole group of micro-batches, the remote experts that a domain's own
token-slots want most (`planning.levers.traffic_replicas`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int16, Int32, Int64
from numpy import ndarray

from relibra.planning.levers.instance_flow import (
    Layer,
    assign_tokens,
    empty_instances,
    list_instances,
    lower_busiest_rank,
)
from relibra.planning.levers.resident_chains import choose_anew
from relibra.planning.levers.traffic_replicas import hottest_remote_experts
from relibra.routing.compiled import compiled

_PUSH_PRICE = 0.002
"""What a new replica may cost, as a share of the ceiling."""
_NEEDED_FROM = 0.6
"""Load of an expert, as a share of the ceiling, above which a replica of it is expected to be useful."""
_NEXT = 0.8
"""Weight of a micro-batch's need against that of the one before it."""
_REUSE = 0.15
"""Weight of expected need against token-slots moved now, both as shares of the ceiling."""
_KEEP = 4.0
"""Weight of a replica's present token-slots, as a share of the ceiling, against its expected need."""
_OTHER_NODE = 0.05
"""Cost of an addition on a node without the expert, as a share of the ceiling."""
_SCORINGS = (1, 2, 3)
"""How a chain chooses among moves (`replication.score_move`)."""
_BONUSES = (4.0, 1.0, 0.25)
"""Bonuses of chains for an expert that is on the rank already, as shares of the ceiling."""


def keep_replicas(
    load_ME: Int[ndarray, "M E"],
    home_E: Int[ndarray, " E"],
    num_ranks: int,
    ranks_per_node: int,
    *,
    slots: int,
    tolerance: float,
    cross_node: bool = False,
    group_M: Int[ndarray, " M"] | None = None,
    source_MXE: Int[ndarray, "M X E"] | None = None,
    traffic_slots: int = 0,
    held_RB: Int[ndarray, "R B"] | None = None,
) -> tuple[Int16[ndarray, "M R B"], Int32[ndarray, "M R B"]]:
    """Return resident replicas of one layer for each micro-batch.

    home_E         home rank of each expert
    slots          slots of a rank, B
    tolerance      accepted load of the busiest rank above the mean, as a share; larger: fewer replicas change
    cross_node     replicas may be on nodes without the expert
    group_M        group (mini-batch) of each micro-batch, ascending; slots are empty at the start of each. None: one
    source_MXE     token-slots that each of X domains sends to each expert: a replica takes those of its own domain
                   first. Domains are nodes, or the ranks of a single node. None: token-slots start at the homes
    traffic_slots  how many slots, the first of each rank, hold experts for traffic; needs `source_MXE`
    held_RB        experts that stay in the slots in all micro-batches, in slots for traffic too (-1: none): only
                   token-slots are split
    returns        expert in each slot (-1: empty; one without token-slots stays for later micro-batches), its
                   token-slots
    """
    M, E = load_ME.shape
    replica_MRB = np.full((M, num_ranks, slots), -1, dtype=np.int16)
    quota_MRB = np.zeros((M, num_ranks, slots), dtype=np.int32)
    if slots == 0 or num_ranks == 1:
        return replica_MRB, quota_MRB
    load_ME, home_E = load_ME.astype(np.int64), home_E.astype(np.int64)
    order_E = np.argsort(home_E, kind="stable")
    starts = np.searchsorted(home_E[order_E], np.arange(num_ranks + 1))
    layer = Layer(home_E, order_E, starts, ranks_per_node, cross_node)
    if source_MXE is None:
        source_MXE = np.zeros((M, 0, E), dtype=np.int64)
    changes = [] if group_M is None else (np.flatnonzero(np.diff(group_M)) + 1).tolist()
    for first, stop in pairwise([0, *changes, M]):
        group = slice(first, stop)
        given_RB = np.full((num_ranks, slots), -1, dtype=np.int64) if held_RB is None else held_RB.astype(np.int64)
        if traffic_slots and held_RB is None:
            given_RB[:, :traffic_slots] = hottest_remote_experts(
                source_MXE[group].sum(axis=0), home_E, num_ranks // source_MXE.shape[1], traffic_slots
            )
        ceiling_M = _ceilings(load_ME[group], source_MXE[group], layer, given_RB, tolerance)
        future_ME = _future_need(load_ME[group] / ceiling_M[:, None])
        arrays = (load_ME[group], source_MXE[group], ceiling_M, future_ME, given_RB)
        _keep_in_group(layer, *arrays, held_RB is not None, replica_MRB[group], quota_MRB[group])
    return replica_MRB, quota_MRB


def _ceilings(
    load_ME: ndarray, source_MXE: ndarray, layer: Layer, given_RB: ndarray, tolerance: float
) -> Int64[ndarray, " M"]:
    """Return the load of the busiest rank that is low enough: a little above the mean, or the mean of the fullest node.

    A node's load: token-slots of its homes; its own of experts in its `given_RB` count here, not on their home's node.
    """
    R, G = len(given_RB), layer.ranks_per_node
    ceiling_M = load_ME.sum(axis=1) / R * (1 + tolerance)
    if not layer.cross_node and R > G:
        node_E = layer.home_E // G
        load_MN = load_ME @ (node_E[:, None] == np.arange(R // G)).astype(np.int64)
        for node in range(source_MXE.shape[1]):
            held = np.unique(given_RB[node * G : (node + 1) * G])
            for e in held[held >= 0]:
                load_MN[:, node] += source_MXE[:, node, e]
                load_MN[:, node_E[e]] -= source_MXE[:, node, e]
        ceiling_M = np.maximum(ceiling_M, load_MN.max(axis=1) / G * (1 + tolerance / 4))
    return np.maximum(1, np.ceil(ceiling_M - 1e-9).astype(np.int64))


def _future_need(share_ME: Float64[ndarray, "M E"]) -> Float64[ndarray, "M E"]:
    """Return the need of replicas after each micro-batch, later ones with falling weight.

    share_ME   load of each expert as a share of the ceiling
    """
    need_ME, future_ME = np.maximum(0.0, share_ME - _NEEDED_FROM), np.zeros_like(share_ME)
    for m in range(len(need_ME) - 2, -1, -1):
        future_ME[m] = need_ME[m + 1] + _NEXT * future_ME[m + 1]
    return future_ME


@compiled
@no_type_check
def _keep_in_group(
    layer, load_ME, source_MXE, ceiling_M, future_ME, given_RB, all_stay, replica_MRB, quota_MRB
) -> None:
    """Fill the slots of one group's micro-batches, in order; `given_RB` are the experts that stay in all of them.

    all_stay   no other expert comes
    """
    M, R, B = replica_MRB.shape
    instances = empty_instances(load_ME.shape[1], R)
    stays_RB = (given_RB >= 0) | all_stay
    held_RB, tried_RB = given_RB.copy(), given_RB.copy()
    for m in range(M):
        load_E, source_XE, ceiling, future_E = load_ME[m], source_MXE[m], ceiling_M[m], future_ME[m]
        before_RB = held_RB.copy()
        top, added = _add_replicas(layer, load_E, source_XE, ceiling, future_E, held_RB, stays_RB, instances)
        best = max(top, ceiling) / ceiling + _PUSH_PRICE * added
        if top > ceiling and not stays_RB.all():
            for scoring in _SCORINGS:
                for bonus in _BONUSES:
                    tried_RB[:] = before_RB
                    added = _choose_by_chains(
                        layer, load_E, source_XE, ceiling, future_E, scoring, bonus, given_RB, tried_RB, instances
                    )
                    top = _split(layer, load_E, source_XE, ceiling, tried_RB, instances)
                    cost = max(top, ceiling) / ceiling + _PUSH_PRICE * added
                    if cost < best - 1e-12:
                        best = cost
                        held_RB[:] = tried_RB
        _split(layer, load_E, source_XE, ceiling, held_RB, instances)
        for r in range(R):
            for b in range(B):
                if held_RB[r, b] >= 0:
                    replica_MRB[m, r, b] = held_RB[r, b]
                    quota_MRB[m, r, b] = instances.tokens_ER[held_RB[r, b], r]


@compiled
@no_type_check
def _split(layer, load_E, source_XE, ceiling, held_RB, instances) -> int:
    """Split the token-slots over homes and the experts in slots; return the load of the busiest rank."""
    list_instances(layer.home_E, held_RB, instances)
    assign_tokens(load_E, source_XE, layer.home_E, instances)
    return lower_busiest_rank(instances, ceiling, layer.ranks_per_node)


@compiled
@no_type_check
def _choose_by_chains(
    layer, load_E, source_XE, ceiling, future_E, scoring, bonus, given_RB, held_RB, instances
) -> int:  # fmt: skip
    """Choose the experts in slots by chains, node by node or over all ranks; return how many are new."""
    list_instances(layer.home_E, given_RB, instances)
    assign_tokens(load_E, source_XE, layer.home_E, instances)
    left_E = np.empty(len(load_E), np.int64)
    for e in range(len(load_E)):
        left_E[e] = instances.tokens_ER[e, layer.home_E[e]]
    R, used_RB, added = len(held_RB), given_RB >= 0, 0
    domain = R if layer.cross_node else layer.ranks_per_node
    for low in range(0, R, domain):
        added += choose_anew(
            layer, low, low + domain, ceiling, future_E, scoring, bonus, held_RB, used_RB, instances.load_R, left_E
        )
    return added


@compiled
@no_type_check
def _add_replicas(layer, load_E, source_XE, ceiling, future_E, held_RB, stays_RB, instances):
    """Add replicas one by one until the busiest rank is at the ceiling; return its load and how many were added.

    held_RB    experts in slots; changed in place
    stays_RB   slots that may not be emptied
    """
    fixed_RB = stays_RB.copy()
    top, added = _split(layer, load_E, source_XE, ceiling, held_RB, instances), 0
    while top > ceiling:
        e, r, b = _best_addition(layer, ceiling, future_E, held_RB, fixed_RB, instances)
        if e < 0:
            break
        out = held_RB[r, b]
        if out >= 0:
            home, tokens = layer.home_E[out], instances.tokens_ER[out, r]
            instances.tokens_ER[out, home] += tokens
            instances.tokens_ER[out, r] = 0
            instances.load_R[home] += tokens
            instances.load_R[r] -= tokens
        held_RB[r, b], fixed_RB[r, b] = e, True
        added += 1
        list_instances(layer.home_E, held_RB, instances)
        top = lower_busiest_rank(instances, ceiling, layer.ranks_per_node)
    return top, added


@compiled
@no_type_check
def _best_addition(layer, ceiling, future_E, held_RB, fixed_RB, instances):
    """Return the expert to add, its rank and its slot; expert -1: none helps. Ties: lower rank, then lower expert."""
    closed_R, load_R, tokens_ER, count_E = instances.closed_R, instances.load_R, instances.tokens_ER, instances.count_E
    excess, stuck_E = _stuck_tokens(ceiling, instances)
    stuck_experts = np.flatnonzero(stuck_E)
    best, best_e, best_r, best_b = 0.0, -1, -1, -1
    for r in range(len(load_R)):
        if closed_R[r] or load_R[r] >= ceiling:
            continue
        b, kept = _slot_to_fill(r, ceiling, future_E, held_RB, fixed_RB, instances)
        if b < 0:
            continue
        back = tokens_ER[held_RB[r, b], r] if held_RB[r, b] >= 0 else 0
        for e in stuck_experts:
            amount = min(stuck_E[e], ceiling - load_R[r] + back, excess)
            here, near = _is_near(e, r, layer.ranks_per_node, instances)
            if amount <= 0 or here or not (near or layer.cross_node):
                continue
            score = (amount - back) / ceiling + _REUSE * (future_E[e] / (count_E[e] + 1) - kept)
            score -= 0.0 if near else _OTHER_NODE
            if best_e < 0 or score > best:
                best, best_e, best_r, best_b = score, e, r, b
    return best_e, best_r, best_b


@compiled
@no_type_check
def _stuck_tokens(ceiling, instances):
    """Return the load of closed ranks above the ceiling, and each expert's token-slots on closed ranks."""
    excess, stuck_E = 0, np.zeros(len(instances.count_E), np.int64)
    for r in range(len(instances.load_R)):
        if instances.closed_R[r]:
            excess += instances.load_R[r] - ceiling
    for e in range(len(stuck_E)):
        for i in range(instances.count_E[e]):
            r = instances.rank_EI[e, i]
            if instances.closed_R[r]:
                stuck_E[e] += instances.tokens_ER[e, r]
    return excess, stuck_E


@compiled
@no_type_check
def _is_near(e, r, ranks_per_node, instances):
    """Return whether an expert has an instance on a rank, and whether on the node of the rank."""
    here, near = False, False
    for i in range(instances.count_E[e]):
        here = here or instances.rank_EI[e, i] == r
        near = near or instances.rank_EI[e, i] // ranks_per_node == r // ranks_per_node
    return here, near


@compiled
@no_type_check
def _slot_to_fill(r, ceiling, future_E, held_RB, fixed_RB, instances):
    """Return the slot of a rank whose expert is needed least, and how much it is needed; slot -1: none may be used."""
    best, best_b = 0.0, -1
    for b in range(held_RB.shape[1]):
        if fixed_RB[r, b]:
            continue
        e = held_RB[r, b]
        if e < 0:
            return b, 0.0
        need = future_E[e] / instances.count_E[e] + _KEEP * instances.tokens_ER[e, r] / ceiling
        if best_b < 0 or need < best:
            best, best_b = need, b
    return best_b, best
