"""Copies of hot experts on expert nodes, so that their nodes need no longer than the others.

MegaScale-Infer (arXiv 2504.02263): experts on nodes with spare slots, minimising the busiest node; an expert costs at
least what reading its weights costs, however few rows it has. Copies are given as EPLB gives them; a node never holds
two of one expert. The plan of a period is made from the loads of the period before.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, Shaped
from numpy import ndarray

from relibra.errors import PlanError
from relibra.planning.baselines.eplb import give_copies


def place_copies(
    load_E: Shaped[ndarray, " E"], nodes: int, slots: int, cold: int | float = 0.0
) -> Int64[ndarray, "N P"]:
    """Return the expert in each of the P = `slots` slots of each node, -1 where a slot stays empty.

    Every slot goes to the expert of the largest cost per copy, as long as no copy then costs less than `cold`. Then
    copies, heaviest first, go to the cheapest node that has room and does not hold the expert. Ties: lower id.

    load_E    cost of the rows of each expert in the period before, any unit
    cold      least cost of an expert on a node, in the same unit (`K_cold`)
    raises    PlanError when the slots are fewer than the experts

    >>> place_copies(np.array([8.0, 1.0, 1.0]), 2, 2).tolist()
    [[0, 1], [0, 2]]
    """
    E = len(load_E)
    if nodes * slots < E:
        raise PlanError(f"{nodes} nodes of {slots} slots do not hold {E} experts: give more slots")
    cost_E = np.maximum(load_E.astype(np.float64), cold)
    most_E = np.full(E, nodes)
    if cold:
        most_E = np.clip(np.minimum(cost_E, (nodes + 1) * cold) / cold, 1, nodes).astype(np.int64)
    expert_X, _, copies_E = give_copies(cost_E, nodes * slots, most_E)
    expert_X = expert_X[expert_X >= 0]
    share_X = (cost_E / copies_E)[expert_X]
    placed_NP = np.full((nodes, slots), -1, dtype=np.int64)
    total_N, filled_N = np.zeros(nodes), np.zeros(nodes, dtype=np.int64)
    for x in np.lexsort((expert_X, -share_X)):
        room_N = (filled_N < slots) & ~(placed_NP == expert_X[x]).any(axis=1)
        if not room_N.any():
            continue  # a further copy of an expert that every node with room has
        node = int(np.argmin(np.where(room_N, total_N, np.inf)))
        placed_NP[node, filled_N[node]] = expert_X[x]
        filled_N[node] += 1
        total_N[node] += share_X[x]
    return placed_NP
