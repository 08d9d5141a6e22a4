"""Homes: which rank owns each expert during a step, decided from every micro-batch of it.

Replicas never have to leave a node as long as no node is too full, so homes are chosen in two levels: *nodes* by
simulated annealing over swaps of two experts (`relibra.planning.annealing`), judged by the individual micro-batches and
not by their sum; then *ranks* inside each node, the same way. (ReLibra, arXiv 2605.08639; two levels also in
ForeMoE, arXiv 2606.11867.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64, Shaped
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from relibra.planning.annealing import COLD, anneal_nodes, home_cost


@dataclass(frozen=True, kw_only=True)
class HomeWeights:
    """What else counts when homes are chosen, measured against one token-slot of compute on the fullest node.

    network   per token-slot that enters or leaves the node, whichever is more
    move      per expert that changes its node
    """

    network: float = 0.0
    move: float = 0.0


def place_homes(
    load_ME: Int64[ndarray, "M E"],
    source_MNE: Int64[ndarray, "M N E"],
    previous_home_E: Int64[ndarray, " E"],
    ranks_per_node: int,
    *,
    weights: HomeWeights,
    temperature: float,
    proposals: int,
    seed: int,
    start_node_E: Int64[ndarray, " E"] | None = None,
) -> Int64[ndarray, " E"]:
    """Choose the home rank of each expert of one layer; every rank gets E / R experts.

    source_MNE        token-slots that node N sends to expert E
    previous_home_E   homes before the step: one of the starts, and what moving is counted from
    temperature       how far the annealing may stray from its start: `annealing.COLD` or `WARM`
    proposals         swaps tried
    start_node_E      another start (say, `co_activation_groups`); the best of all starts is annealed
    returns           `previous_home_E` itself unless the cost falls by more than moving costs, or, on unchanged nodes,
                      ranks are busier than with the new homes
    """
    num_nodes = source_MNE.shape[1]
    previous_node_E = previous_home_E // ranks_per_node
    node_E = previous_node_E
    if num_nodes > 1 and load_ME.any():
        problem = (load_ME, source_MNE, previous_node_E, weights.network, weights.move)
        starts = [previous_node_E, longest_first(load_ME.sum(axis=0), num_nodes)]
        if start_node_E is not None:
            starts.append(start_node_E)
        start_E = min(starts, key=lambda start: home_cost(start, *problem))
        found_E = anneal_nodes(start_E, *problem, temperature=temperature, proposals=proposals, seed=seed)
        if home_cost(found_E, *problem) < home_cost(previous_node_E, *problem):
            node_E = found_E
    home_E = ranks_inside_nodes(
        load_ME,
        node_E,
        previous_home_E,
        ranks_per_node,
        num_nodes,
        proposals=proposals // (2 * num_nodes),
        seed=seed,
    )
    same_nodes = bool((node_E == previous_node_E).all())
    if same_nodes and busiest(load_ME, home_E) >= busiest(load_ME, previous_home_E):
        return previous_home_E
    return home_E


def busiest(load_ME: Int64[ndarray, "M E"], home_E: Int[ndarray, " E"]) -> int:
    """Sum over micro-batches of the load of the fullest rank (or node, given nodes), without replicas."""
    on_rank_ER = np.zeros((len(home_E), int(home_E.max()) + 1), dtype=np.int64)
    on_rank_ER[np.arange(len(home_E)), home_E] = 1
    return int((load_ME @ on_rank_ER).max(axis=1).sum())


def ranks_inside_nodes(
    load_ME: Int64[ndarray, "M E"],
    node_E: Int[ndarray, " E"],
    previous_home_E: Int[ndarray, " E"],
    ranks_per_node: int,
    num_nodes: int,
    *,
    proposals: int,
    seed: int,
) -> Int64[ndarray, " E"]:
    """Lay the experts of each node on its ranks: longest first, then annealed over the individual micro-batches.

    Even ranks need fewer replicas. In the end ranks are named so that most experts stay where they are.

    proposals   swaps tried per node
    """
    home_E = np.empty(len(node_E), dtype=np.int64)
    for node in range(num_nodes):
        experts = np.flatnonzero(node_E == node)
        load_MX = np.ascontiguousarray(load_ME[:, experts])
        group_X = longest_first(load_MX.sum(axis=0), ranks_per_node)
        if ranks_per_node > 1:
            nowhere = np.zeros((len(load_ME), ranks_per_node, len(experts)), dtype=np.int64)
            group_X = anneal_nodes(
                group_X, load_MX, nowhere, group_X, 0.0, 0.0, temperature=COLD, proposals=proposals, seed=seed + node
            )
        stays = np.zeros((ranks_per_node, ranks_per_node), dtype=np.int64)
        before_X = previous_home_E[experts] - node * ranks_per_node
        here = (before_X >= 0) & (before_X < ranks_per_node)
        np.add.at(stays, (group_X[here], before_X[here]), 1)
        _, rank_of_group = linear_sum_assignment(stays, maximize=True)
        home_E[experts] = node * ranks_per_node + rank_of_group[group_X]
    return home_E


def longest_first(load_E: Shaped[ndarray, " E"], num_bins: int) -> Int64[ndarray, " E"]:
    """Deal experts to bins of equal count: heaviest expert first, to the lightest bin with room (ties: lower id).

    >>> longest_first(np.array([5, 4, 3, 2]), 2).tolist()
    [0, 1, 1, 0]
    """
    room = np.full(num_bins, len(load_E) // num_bins)
    filled = np.zeros(num_bins)
    bin_E = np.empty(len(load_E), dtype=np.int64)
    for e in np.argsort(-load_E, kind="stable"):
        best = int(np.argmin(np.where(room > 0, filled, np.inf)))
        bin_E[e] = best
        filled[best] += load_E[e]
        room[best] -= 1
    return bin_E


def co_activation_groups(pairs_EE: Int64[ndarray, "E E"], num_bins: int) -> Int64[ndarray, " E"]:
    """Deal experts to bins of equal count so that experts picked by the same token meet: fewer rows cross nodes.

    A start for the annealing where the network decides and co-routing is known (`statistics.co_activation`): a bin is
    seeded with the busiest expert left and takes, one at a time, the expert picked most often together with it.
    """
    E = len(pairs_EE)
    bin_E = np.full(E, -1, dtype=np.int64)
    for b in range(num_bins):
        together_E = np.diagonal(pairs_EE).astype(np.float64)
        for _ in range(E // num_bins):
            e = int(np.argmax(np.where(bin_E < 0, together_E, -1.0)))
            bin_E[e] = b
            together_E = pairs_EE[bin_E == b].sum(axis=0, dtype=np.float64)
    return bin_E
