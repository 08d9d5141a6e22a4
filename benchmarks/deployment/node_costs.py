"""Cost of each expert node under a placement: what `place_copies` evens out."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from numpy import ndarray


def node_costs(
    load_E: Shaped[ndarray, " E"], placed_NP: Int64[ndarray, "N P"], cold: int | float = 0.0, *, as_paper: bool = False
) -> Float64[ndarray, " N"]:
    """Return the cost of each node, when copies share the rows of their expert evenly.

    as_paper    the floor is shared by copies too, `x max(a, K)` of the paper; else each copy pays it: `max(x a, K)`
    """
    held_NE = np.zeros((len(placed_NP), len(load_E)))
    node_X, slot_X = np.nonzero(placed_NP >= 0)
    np.add.at(held_NE, (node_X, placed_NP[node_X, slot_X]), 1.0)
    share_NE = held_NE / held_NE.sum(axis=0)
    if as_paper:
        costs: Float64[ndarray, " N"] = (share_NE * np.maximum(load_E, cold)).sum(axis=1)
        return costs
    each: Float64[ndarray, " N"] = np.where(held_NE > 0, np.maximum(share_NE * load_E, cold), 0.0).sum(axis=1)
    return each
