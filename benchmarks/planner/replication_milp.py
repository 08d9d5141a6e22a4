"""Exact replication as a mixed-integer linear program: the reference that the fast ways are measured against.

    min tau   s.t.  sum_r y[e,r] = load[e];   y[e,r] <= load[e] z[e,r];   z[e,home] = 1;   z binary
                    sum_e (not at home) z[e,r] <= slots;   sum_e y[e,r] <= tau

(ReLibra names this program, arXiv 2605.08639; the variables are ours.) Loads may be split as real numbers, so the
optimum can be a fraction of a token below what whole tokens reach. 0.02 to 1 s per node of 8 ranks: for tests and
benchmarks.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from relibra.errors import PlanError


def replicate_milp(
    load_E: Int64[ndarray, " E"],
    home_E: Int[ndarray, " E"],
    num_ranks: int,
    slots: int,
    *,
    time_limit_seconds: float = 60.0,
) -> float:
    """Return the lowest load of the busiest rank that any replicas and split can reach, all ranks in one node.

    raises   PlanError when the solver does not prove an optimum within the limit
    """
    E, R = len(load_E), num_ranks
    pairs = E * R
    scale = max(1, int(load_E.sum()) // R)  # variables in units of the mean load: better conditioned
    load = load_E / scale
    pair_expert, pair_rank = np.divmod(np.arange(pairs), R)
    away = home_E[pair_expert] != pair_rank
    one = np.ones(pairs)
    columns = 2 * pairs + 1  # y, then z, then tau
    pair = np.arange(pairs)

    def matrix(rows: list[ndarray], cols: list[ndarray], values: list[ndarray], height: int) -> coo_array:
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols)))
        return coo_array(entries, shape=(height, columns))

    computed_once = matrix([pair_expert], [pair], [one], E)
    held = matrix([pair, pair], [pair, pairs + pair], [one, -load[pair_expert]], pairs)
    room = matrix([pair_rank[away]], [pairs + pair[away]], [one[away]], R)
    busiest = matrix([pair_rank, np.arange(R)], [pair, np.full(R, 2 * pairs)], [one, -np.ones(R)], R)
    lower, upper = np.zeros(columns), np.full(columns, np.inf)
    upper[pairs : 2 * pairs] = 1
    lower[pairs : 2 * pairs][~away] = 1
    objective = np.zeros(columns)
    objective[-1] = 1
    result = milp(
        objective,
        constraints=[
            LinearConstraint(computed_once.tocsr(), load, load),
            LinearConstraint(held.tocsr(), -np.inf, 0),
            LinearConstraint(room.tocsr(), -np.inf, slots),
            LinearConstraint(busiest.tocsr(), -np.inf, 0),
        ],
        bounds=Bounds(lower, upper),
        integrality=np.r_[np.zeros(pairs), np.ones(pairs), 0],
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 1e-4},
    )
    if result.status != 0:
        raise PlanError(f"no proven optimum for {E} experts on {R} ranks with {slots} slots: {result.message}")
    return float(result.fun) * scale
