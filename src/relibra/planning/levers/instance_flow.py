"""Split of token-slots over given instances that lowers the busiest rank, along shortest paths of ranks.

An *instance* is an expert on a rank: at home or as a replica. Two ranks are joined if both hold an expert, and
token-slots of that expert may move from one to the other. Load above a ceiling moves along the shortest such path to
the nearest rank below it. If no path is left, the ranks reached cannot get below their mean, whatever the split: they
prove how low the busiest rank can get (linear program of LPLB and MicroMoE, arXiv 2511.16947, in integers).
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from relibra.routing.compiled import compiled


class Layer(NamedTuple):
    """What stays the same over the micro-batches of a layer.

    home_E            home rank of each expert
    order_E, starts   experts by home rank; those of rank r are order_E[starts[r]:starts[r + 1]]
    ranks_per_node    G
    cross_node        replicas may be on nodes without the expert
    """

    home_E: Int64[ndarray, " E"]
    order_E: Int64[ndarray, " E"]
    starts: Int64[ndarray, " R1"]
    ranks_per_node: int
    cross_node: bool


class Instances(NamedTuple):
    """Instances of one layer's experts, and the token-slots that each computes in one micro-batch; changed in place.

    tokens_ER               token-slots of each instance
    load_R                  token-slots of each rank
    rank_EI, count_E        ranks that hold an expert, its home first, and their number
    movable_RX, movable_R   experts of a rank that other ranks hold too, and their number
    closed_R                ranks that no token-slot can leave: the experts that they compute have instances on these
                            ranks alone. Their mean load bounds the busiest rank. Set after a result above the ceiling
    from_R, expert_R, queue_R   path search: rank that gives, what it gives, ranks in the order reached
    """

    tokens_ER: Int64[ndarray, "E R"]
    load_R: Int64[ndarray, " R"]
    rank_EI: Int64[ndarray, "E R"]
    count_E: Int64[ndarray, " E"]
    movable_RX: Int64[ndarray, "R E"]
    movable_R: Int64[ndarray, " R"]
    closed_R: Bool[ndarray, " R"]
    from_R: Int64[ndarray, " R"]
    expert_R: Int64[ndarray, " R"]
    queue_R: Int64[ndarray, " R"]


@compiled
@no_type_check
def empty_instances(num_experts, num_ranks):
    """Return room for the instances of one layer."""
    E, R = num_experts, num_ranks
    tokens_ER, load_R, rank_EI, count_E = (
        np.zeros((E, R), np.int64),
        np.zeros(R, np.int64),
        np.zeros((E, R), np.int64),
        np.zeros(E, np.int64),
    )
    movable_RX, movable_R, closed_R = np.zeros((R, E), np.int64), np.zeros(R, np.int64), np.zeros(R, np.bool_)
    from_R, expert_R, queue_R = np.zeros(R, np.int64), np.zeros(R, np.int64), np.zeros(R, np.int64)
    return Instances(tokens_ER, load_R, rank_EI, count_E, movable_RX, movable_R, closed_R, from_R, expert_R, queue_R)


@compiled
@no_type_check
def list_instances(home_E, held_RB, instances) -> None:
    """List the instances of experts at home and in slots; token-slots stay as they are."""
    rank_EI, count_E = instances.rank_EI, instances.count_E
    for e in range(len(home_E)):
        rank_EI[e, 0] = home_E[e]
        count_E[e] = 1
    R, B = held_RB.shape
    for r in range(R):
        for b in range(B):
            e = held_RB[r, b]
            if e >= 0:
                rank_EI[e, count_E[e]] = r
                count_E[e] += 1
    instances.movable_R[:] = 0
    for e in range(len(home_E)):
        if count_E[e] > 1:
            for i in range(count_E[e]):
                r = rank_EI[e, i]
                instances.movable_RX[r, instances.movable_R[r]] = e
                instances.movable_R[r] += 1


@compiled
@no_type_check
def assign_tokens(load_E, source_XE, home_E, instances) -> None:
    """Give each expert's token-slots to its home; those of another domain that has a replica go to the first one there.

    source_XE   token-slots that each domain of ranks sends to each expert; no domains: all go to the homes
    """
    tokens_ER, load_R = instances.tokens_ER, instances.load_R
    X = len(source_XE)
    ranks_per_domain = len(load_R) // max(1, X)
    tokens_ER[:] = 0
    load_R[:] = 0
    for e in range(len(load_E)):
        home = home_E[e]
        tokens_ER[e, home] = load_E[e]
        load_R[home] += load_E[e]
        if X < 2:
            continue
        last_domain = home // ranks_per_domain
        for i in range(1, instances.count_E[e]):  # replicas come by rank, so those of a domain follow one another
            r = instances.rank_EI[e, i]
            x = r // ranks_per_domain
            if x == last_domain or x == home // ranks_per_domain:
                continue
            last_domain = x
            tokens_ER[e, home] -= source_XE[x, e]
            tokens_ER[e, r] += source_XE[x, e]
            load_R[home] -= source_XE[x, e]
            load_R[r] += source_XE[x, e]


@compiled
@no_type_check
def lower_busiest_rank(instances, ceiling, ranks_per_node) -> int:
    """Move token-slots until the busiest rank is at most at the ceiling or as low as possible; return its load.

    `closed_R` is set as in `Instances`.
    """
    load_R, queue_R = instances.load_R, instances.queue_R
    instances.closed_R[:] = False
    while True:
        s = np.argmax(load_R)
        if load_R[s] <= ceiling:
            return load_R[s]
        t, reached = _find_room(s, ceiling, ranks_per_node, instances)
        if t >= 0:
            _move_along_path(s, t, min(load_R[s] - ceiling, ceiling - load_R[t]), instances)
            continue
        total = 0
        instances.closed_R[:] = False
        for x in range(reached):
            total += load_R[queue_R[x]]
            instances.closed_R[queue_R[x]] = True
        ceiling = -(-total // reached)


@compiled
@no_type_check
def _find_room(s, ceiling, ranks_per_node, instances):
    """Return the nearest rank below the ceiling that token-slots of rank `s` reach, or -1, and how many were seen.

    Of the ranks that one rank can give to, those on its own node come first.
    """
    tokens_ER, load_R, queue_R = instances.tokens_ER, instances.load_R, instances.queue_R
    from_R, expert_R = instances.from_R, instances.expert_R
    from_R[:] = -1
    from_R[s], queue_R[0], head, tail = s, s, 0, 1
    while head < tail:
        r = queue_R[head]
        head += 1
        for other_node in (False, True):
            for x in range(instances.movable_R[r]):
                e = instances.movable_RX[r, x]
                if tokens_ER[e, r] == 0:
                    continue
                for i in range(instances.count_E[e]):
                    t = instances.rank_EI[e, i]
                    if from_R[t] >= 0 or (t // ranks_per_node != r // ranks_per_node) != other_node:
                        continue
                    from_R[t], expert_R[t], queue_R[tail] = r, e, t
                    tail += 1
                    if load_R[t] < ceiling:
                        return t, tail
    return -1, tail


@compiled
@no_type_check
def _move_along_path(s, t, amount, instances) -> None:
    """Move up to `amount` token-slots from rank `s` to rank `t` along the path found."""
    tokens_ER, from_R, expert_R = instances.tokens_ER, instances.from_R, instances.expert_R
    r = t
    while r != s:
        amount = min(amount, tokens_ER[expert_R[r], from_R[r]])
        r = from_R[r]
    r = t
    while r != s:
        tokens_ER[expert_R[r], from_R[r]] -= amount
        tokens_ER[expert_R[r], r] += amount
        r = from_R[r]
    instances.load_R[s] -= amount
    instances.load_R[t] += amount
