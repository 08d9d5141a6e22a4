"""Homes dealt again: experts to nodes and ranks by falling load, longest processing time first."""

from __future__ import annotations

from typing import Literal, no_type_check

import numpy as np
from jaxtyping import Int, Int64, Shaped
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from relibra.routing.compiled import compiled

Homes = Literal["stay", "in nodes", "over nodes"]
"""What experts may do: nothing, change their rank inside their node, or change their node too."""

UNASSIGNED = -1
"""No bin yet: such as an expert that comes from another node."""


def deal_homes(
    load_E: Shaped[ndarray, " E"],
    home_E: Int[ndarray, " E"],
    num_ranks: int,
    ranks_per_node: int,
    *,
    over_nodes: bool,
) -> Int64[ndarray, " E"]:
    """Return the home rank of each expert of a layer; every rank keeps E / R experts.

    load_E       token-slots of each expert in the step
    home_E       home ranks before; nodes and ranks are numbered so that most experts stay on theirs
    over_nodes   experts may change their node; False: only their rank inside it
    """
    G, N = ranks_per_node, num_ranks // ranks_per_node
    node_E = home_E.astype(np.int64) // G
    if over_nodes:
        node_E = renumber_bins(longest_first(load_E, N), node_E, N)
    dealt_E = np.empty(len(home_E), dtype=np.int64)
    for node in range(N):
        experts = np.flatnonzero(node_E == node)
        before_X = home_E[experts].astype(np.int64) - node * G
        before_X[(before_X < 0) | (before_X >= G)] = UNASSIGNED
        dealt_E[experts] = node * G + renumber_bins(longest_first(load_E[experts], G), before_X, G)
    return dealt_E


def longest_first(load_E: Shaped[ndarray, " E"], num_bins: int) -> Int64[ndarray, " E"]:
    """Return experts in bins of equal count: heaviest expert first, to the lightest bin with room (ties: lower id).

    >>> longest_first(np.array([5, 4, 3, 2]), 2).tolist()
    [0, 1, 1, 0]
    """
    bin_E = np.full(len(load_E), UNASSIGNED)
    room, filled = np.full(num_bins, len(load_E) // num_bins), np.zeros(num_bins)
    fill_bins(np.argsort(-load_E, kind="stable"), load_E.astype(np.float64), room, filled, bin_E)
    return bin_E


def renumber_bins(bin_E: Int[ndarray, " E"], before_E: Int[ndarray, " E"], num_bins: int) -> Int64[ndarray, " E"]:
    """Return the bins numbered so that most experts stay in the bin they were in (`UNASSIGNED`: in none)."""
    stays = np.zeros((num_bins, num_bins), dtype=np.int64)
    here = before_E != UNASSIGNED
    np.add.at(stays, (bin_E[here], before_E[here]), 1)
    _, name_of_bin = linear_sum_assignment(stays, maximize=True)
    return name_of_bin[bin_E].astype(np.int64)


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
