"""Homes: the rank that owns each expert during a step, chosen from the loads of all its micro-batches.

If no node is too full, replicas can stay inside nodes, so homes are chosen in two levels: *nodes* by simulated
annealing over swaps of two experts (`annealing`), whose cost is a sum over micro-batches; then *ranks* inside each
node, the same way. (ReLibra, arXiv 2605.08639; two levels also in ForeMoE, arXiv 2606.11867.)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.levers.homes import UNASSIGNED, SwapPrices, fill_bins, heaviest_first, renumber_bins
from relibra.planning.relibra_paper.annealing import COLD, anneal_nodes, home_cost


def place_homes(
    load_ME: Int64[ndarray, "M E"],
    source_MNE: Int64[ndarray, "M N E"],
    previous_home_E: Int64[ndarray, " E"],
    ranks_per_node: int,
    *,
    prices: SwapPrices,
    temperature: float,
    proposals: int,
    seed: int,
) -> Int64[ndarray, " E"]:
    """Return the home rank of each expert of one layer; every rank gets E / R experts.

    source_MNE        token-slots that node N sends to expert E
    previous_home_E   homes before the step: one of the starts, and the origin of moves
    temperature       first temperature of the annealing: `annealing.COLD` or `WARM`
    proposals         swaps tried
    returns           new homes if they lower the cost (on unchanged nodes: the load of the busiest ranks) by more than
                      the moves cost, else `previous_home_E`
    """
    num_nodes = source_MNE.shape[1]
    previous_node_E = previous_home_E // ranks_per_node
    node_E = previous_node_E
    if num_nodes > 1 and load_ME.any():
        problem = (load_ME, source_MNE, previous_node_E, prices.network, prices.move)
        starts = [previous_node_E, heaviest_first(load_ME.sum(axis=0), num_nodes)]
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
        move=prices.move_inside,
        proposals=proposals // (2 * num_nodes),
        seed=seed,
    )
    moved = prices.move_inside * int((home_E != previous_home_E).sum())
    same_nodes = bool((node_E == previous_node_E).all())
    if same_nodes and busiest(load_ME, home_E) + moved >= busiest(load_ME, previous_home_E):
        return previous_home_E
    return home_E


def busiest(load_ME: Int64[ndarray, "M E"], home_E: Int[ndarray, " E"]) -> int:
    """Return the sum over micro-batches of the load of the fullest rank (or node, given nodes), without replicas."""
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
    move: float,
    proposals: int,
    seed: int,
) -> Int64[ndarray, " E"]:
    """Return the home ranks of experts inside their nodes, annealed over micro-batches: even ranks need fewer copies.

    The start is the better of two: heaviest first, or unchanged ranks with newcomers in the gaps.

    move        cost of an expert that changes its rank, in token-slots on the fullest rank
    proposals   swaps tried per node
    """
    home_E = np.empty(len(node_E), dtype=np.int64)
    for node in range(num_nodes):
        experts = np.flatnonzero(node_E == node)
        load_MX = np.ascontiguousarray(load_ME[:, experts])
        before_X = previous_home_E[experts] - node * ranks_per_node
        before_X[(before_X < 0) | (before_X >= ranks_per_node)] = UNASSIGNED
        nowhere = np.zeros((len(load_ME), ranks_per_node, len(experts)), dtype=np.int64)
        problem = (load_MX, nowhere, before_X, 0.0, move)
        dealt_X = renumber_bins(heaviest_first(load_MX.sum(axis=0), ranks_per_node), before_X, ranks_per_node)
        starts = (dealt_X, _keep_ranks(load_MX.sum(axis=0), before_X, ranks_per_node))
        rank_X = min(starts, key=lambda start_X: home_cost(start_X, *problem))
        if ranks_per_node > 1:
            rank_X = anneal_nodes(rank_X, *problem, temperature=COLD, proposals=proposals, seed=seed + node)
        home_E[experts] = node * ranks_per_node + renumber_bins(rank_X, before_X, ranks_per_node)
    return home_E


def _keep_ranks(load_X: ndarray, before_X: ndarray, num_ranks: int) -> Int64[ndarray, " X"]:
    """Return ranks that keep as many experts as fit; newcomers fill the gaps, heaviest first, on the lightest rank."""
    rank_X = before_X.astype(np.int64)
    room, filled = np.full(num_ranks, len(load_X) // num_ranks), np.zeros(num_ranks)
    fill_bins(np.argsort(-load_X, kind="stable"), load_X.astype(np.float64), room, filled, rank_X)
    return rank_X
