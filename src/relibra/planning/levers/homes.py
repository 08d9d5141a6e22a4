"""New homes: experts dealt to the ranks of their node by falling load, or swapped, inside or between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, no_type_check

import numpy as np
from jaxtyping import Int, Int64, Shaped
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.exchange import rows_per_crossing
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

HomeMoves = Literal["stay", "in nodes", "by micro-batch", "over nodes"]
"""stay            experts keep their homes
in nodes        they are dealt to the ranks of their node by their loads in the whole step
by micro-batch  they are swapped on the only node by their loads in each micro-batch: for steps with few replicas
over nodes      they are swapped between nodes, then dealt in their node
"""

_SWEEPS = 4
"""Largest number of passes over all pairs of experts; a pass without a swap ends the search."""
UNASSIGNED = -1
"""Bin of an expert that has none yet, such as one that comes from another node."""


@dataclass(frozen=True, kw_only=True)
class SwapPrices:
    """Prices of a swap of two experts, in token-slots of the fullest node.

    network       of a token-slot that crosses nodes, in the node's busier direction
    move          of an expert that is on another node than before
    move_inside   of an expert that is on another rank of its node, in token-slots of the fullest rank
    """

    network: float = 0.0
    move: float = 0.0
    move_inside: float = 0.0


def swap_prices(request: PlacementRequest, demand: ScheduledDemand, num_domains: int, *, every: int) -> SwapPrices:
    """Return prices relative to the seconds of a token-slot in its expert, forward and backward.

    A token-slot that crosses is 4 rows (dispatch and combine, forward and backward) on the slowest link or, with
    hierarchical dispatch, its share of them. A move is the expert's state over the links of all domains, divided by
    `steps_served`.

    num_domains   between which experts are swapped: nodes, or ranks
    every         only each `every`-th micro-batch is looked at
    """
    cluster, expert = request.cluster, request.expert
    compute, rate = 3 * expert.flops_per_token_slot / cluster.flops_per_second, cluster.slowest_bytes_per_second
    rows = 4 * rows_per_crossing(cluster, demand, request.previous.home_LE)
    state = expert.state_bytes / request.budget.steps_served
    return SwapPrices(
        network=rows * expert.row_bytes / rate / compute,
        move=state / num_domains / every / rate / compute,
        move_inside=state / cluster.ranks_per_node / every / cluster.intra.bytes_per_second / compute,
    )


def deal_inside_nodes(
    load_E: Shaped[ndarray, " E"],
    node_E: Int[ndarray, " E"],
    home_E: Int[ndarray, " E"],
    num_ranks: int,
    ranks_per_node: int,
) -> Int64[ndarray, " E"]:
    """Return the home rank of each expert of a layer on its node, heaviest first; every rank gets E / R experts.

    load_E   token-slots of each expert in the step
    node_E   node of each expert
    home_E   home ranks before; ranks are numbered so that as many experts as possible stay on theirs
    """
    G = ranks_per_node
    dealt_E = np.empty(len(home_E), dtype=np.int64)
    for node in range(num_ranks // G):
        experts = np.flatnonzero(node_E == node)
        before_X = home_E[experts].astype(np.int64) - node * G
        before_X[(before_X < 0) | (before_X >= G)] = UNASSIGNED
        dealt_E[experts] = node * G + renumber_bins(heaviest_first(load_E[experts], G), before_X, G)
    return dealt_E


def swap_ranks(
    load_ME: Int64[ndarray, "M E"], home_E: Int[ndarray, " E"], num_ranks: int, prices: SwapPrices
) -> Int64[ndarray, " E"]:
    """Return the home ranks on one node after swaps of two experts, as long as one lowers the cost of the layer.

    Cost: sum over micro-batches of the fullest rank's load, and `move_inside` x the experts that moved.

    home_E   home ranks before
    """
    swapped_E, load_EM = home_E.astype(np.int64), np.ascontiguousarray(load_ME.T, dtype=np.int64)
    _swap_ranks(load_EM, home_E.astype(np.int64), swapped_E, num_ranks, prices.move_inside)
    return swapped_E


@compiled
@no_type_check
def _swap_ranks(load_EM, before_E, home_E, R, move) -> None:
    """Try all pairs; `most_M1[m]`, what micro-batches m and later can save at most, ends pricing a pair early."""
    E, M = load_EM.shape
    load_RM, fullest_3M, most_M1 = np.zeros((R, M), np.int64), np.zeros((3, M), np.int64), np.zeros(M + 1)
    for e in range(E):
        load_RM[home_E[e]] += load_EM[e]
    _find_fullest(load_RM, fullest_3M, most_M1)
    for _ in range(_SWEEPS):
        swapped = False
        for i in range(E):
            for j in range(i + 1, E):
                a, c = home_E[i], home_E[j]
                if a == c:
                    continue
                change = move * ((c != before_E[i]) + (a != before_E[j]) - (a != before_E[i]) - (c != before_E[j]))
                for m in range(M):
                    if change >= most_M1[m]:
                        break
                    more = load_EM[j, m] - load_EM[i, m]
                    top = max(load_RM[a, m] + more, load_RM[c, m] - more)
                    for r in fullest_3M[: min(3, R), m]:  # the fullest of the ranks that stay as they are
                        if r != a and r != c:
                            top = max(top, load_RM[r, m])
                            break
                    change += top - load_RM[fullest_3M[0, m], m]
                if change >= 0:
                    continue
                load_RM[a] += load_EM[j] - load_EM[i]
                load_RM[c] -= load_EM[j] - load_EM[i]
                home_E[i], home_E[j], swapped = c, a, True
                _find_fullest(load_RM, fullest_3M, most_M1)
        if not swapped:
            return


@compiled
@no_type_check
def _find_fullest(load_RM, fullest_3M, most_M1) -> None:
    """Find up to three fullest ranks, and the sum of fullest less mean load over this micro-batch and later ones."""
    fullest_3M[:] = -1
    for m in range(load_RM.shape[1] - 1, -1, -1):
        for new in range(len(load_RM)):
            for x in range(3):
                old = fullest_3M[x, m]
                if old < 0 or load_RM[new, m] > load_RM[old, m]:
                    fullest_3M[x, m], new = new, old
                if new < 0:
                    break
        most_M1[m] = most_M1[m + 1] + load_RM[fullest_3M[0, m], m] - load_RM[:, m].mean()


def swap_nodes(
    load_ME: Int64[ndarray, "M E"], source_MNE: Int64[ndarray, "M N E"], node_E: Int[ndarray, " E"], prices: SwapPrices
) -> Int64[ndarray, " E"]:
    """Return the node of each expert after swaps of two, as long as one lowers the cost of the layer.

    Cost: sum over micro-batches of the fullest node's load and of `network` x the largest crossing, and the moves.

    source_MNE   token-slots that each node sends to each expert
    """
    swapped_E = node_E.astype(np.int64)
    _swap(load_ME, source_MNE, node_E.astype(np.int64), swapped_E, prices.network, prices.move)
    return swapped_E


@compiled
@no_type_check
def _swap(load_ME, source_MNE, before_E, node_E, network, move) -> None:
    (M, E), N = load_ME.shape, source_MNE.shape[1]
    load_MN, local_MN, sent_MN = np.zeros((M, N)), np.zeros((M, N)), np.zeros((M, N))
    for m in range(M):
        for e in range(E):
            load_MN[m, node_E[e]] += load_ME[m, e]
            local_MN[m, node_E[e]] += source_MNE[m, node_E[e], e]
        for n in range(N):
            sent_MN[m, n] = source_MNE[m, n].sum()
    for _ in range(_SWEEPS):
        swapped = False
        for i in range(E):
            for j in range(i + 1, E):
                a, c = node_E[i], node_E[j]
                if a == c:
                    continue
                change = move * ((c != before_E[i]) + (a != before_E[j]) - (a != before_E[i]) - (c != before_E[j]))
                for m in range(M):
                    more = load_ME[m, j] - load_ME[m, i]
                    local_a = source_MNE[m, a, j] - source_MNE[m, a, i]
                    local_c = source_MNE[m, c, i] - source_MNE[m, c, j]
                    top, new_top, cross, new_cross = 0.0, 0.0, 0.0, 0.0
                    for n in range(N):
                        load, local = load_MN[m, n], local_MN[m, n]
                        top, cross = max(top, load), max(cross, max(load, sent_MN[m, n]) - local)
                        if n == a:
                            load, local = load + more, local + local_a
                        elif n == c:
                            load, local = load - more, local + local_c
                        new_top, new_cross = max(new_top, load), max(new_cross, max(load, sent_MN[m, n]) - local)
                    change += new_top - top + network * (new_cross - cross)
                if change >= 0:
                    continue
                for m in range(M):
                    more = load_ME[m, j] - load_ME[m, i]
                    load_MN[m, a] += more
                    load_MN[m, c] -= more
                    local_MN[m, a] += source_MNE[m, a, j] - source_MNE[m, a, i]
                    local_MN[m, c] += source_MNE[m, c, i] - source_MNE[m, c, j]
                node_E[i], node_E[j] = c, a
                swapped = True
        if not swapped:
            return


def heaviest_first(load_E: Shaped[ndarray, " E"], num_bins: int) -> Int64[ndarray, " E"]:
    """Return the bin of each expert (equal counts): heaviest first, to the lightest bin with room (ties: lower id).

    >>> heaviest_first(np.array([5, 4, 3, 2]), 2).tolist()
    [0, 1, 1, 0]
    """
    bin_E = np.full(len(load_E), UNASSIGNED)
    room, filled = np.full(num_bins, len(load_E) // num_bins), np.zeros(num_bins)
    fill_bins(np.argsort(-load_E, kind="stable"), load_E.astype(np.float64), room, filled, bin_E)
    return bin_E


def renumber_bins(bin_E: Int[ndarray, " E"], before_E: Int[ndarray, " E"], num_bins: int) -> Int64[ndarray, " E"]:
    """Return the bins, numbered so that as many experts as possible stay in theirs (`UNASSIGNED`: in none)."""
    stays = np.zeros((num_bins, num_bins), dtype=np.int64)
    here = before_E != UNASSIGNED
    np.add.at(stays, (bin_E[here], before_E[here]), 1)
    _, new_number = linear_sum_assignment(stays, maximize=True)
    return new_number[bin_E].astype(np.int64)


@compiled
@no_type_check
def fill_bins(order_E, load_E, room, filled, bin_E) -> None:
    """Assign experts without a bin to the lightest one with room, in order; the others keep theirs if it has room."""
    for e in range(len(bin_E)):
        if bin_E[e] != UNASSIGNED:
            if room[bin_E[e]] == 0:
                bin_E[e] = UNASSIGNED
            else:
                room[bin_E[e]] -= 1
                filled[bin_E[e]] += load_E[e]
    for e in order_E:
        if bin_E[e] == UNASSIGNED:
            best = -1
            for b in range(len(room)):
                if room[b] > 0 and (best < 0 or filled[b] < filled[best]):
                    best = b
            bin_E[e] = best
            room[best] -= 1
            filled[best] += load_E[e]
