"""Slow counts of how replicas split the loads of a layer, and the best split there is."""

import numpy as np
from scipy.optimize import linprog


def rank_load(load_E, home_E, replica_RB, quota_RB, *, idle=False):
    """Return the token-slots of each rank [R]; check that every replica is legal.

    idle   replicas may have no token-slots
    """
    load_R, left_E = np.zeros(len(replica_RB), dtype=np.int64), np.asarray(load_E).astype(np.int64)
    for r, (held_B, quota_B) in enumerate(zip(replica_RB, quota_RB, strict=True)):
        held = held_B[held_B >= 0]
        assert len(set(held.tolist())) == len(held)
        assert (home_E[held] != r).all()
        assert (quota_B[held_B >= 0] >= (0 if idle else 1)).all()
        assert (quota_B[held_B < 0] == 0).all()
        left_E[held] -= quota_B[held_B >= 0]
        load_R[r] += quota_B.sum()
    assert (left_E >= 0).all()
    np.add.at(load_R, home_E, left_E)
    return load_R


def lowest_busiest_rank(load_E, home_E, replica_RB):
    """Return the lowest busiest rank of any split over homes and replicas, in fractions, by linear programming."""
    R, E = len(replica_RB), len(home_E)
    rank_X, slot_X = np.nonzero(replica_RB >= 0)
    rank_I, expert_I = np.concatenate([home_E, rank_X]), np.concatenate([np.arange(E), replica_RB[rank_X, slot_X]])
    n = len(rank_I)
    per_rank, per_expert, cost = np.zeros((R, n + 1)), np.zeros((E, n + 1)), np.zeros(n + 1)
    per_rank[rank_I, np.arange(n)] = 1
    per_rank[:, n] = -1
    per_expert[expert_I, np.arange(n)] = cost[n] = 1
    scale = max(1, int(np.max(load_E, initial=0)))
    result = linprog(cost, A_ub=per_rank, b_ub=np.zeros(R), A_eq=per_expert, b_eq=load_E / scale, method="highs")
    assert result.status == 0, result.message
    return float(result.fun) * scale
