"""Bounds: lowest possible load of the busiest rank, for any solver.

All bounds are in whole token-slots of the busiest rank, per micro-batch and layer, and follow from counting: a plan
below its bound has wrong loads.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.loads import home_rank_load
from relibra.planning.placement import Scope


def reachable_bound(
    load_MLE: Int64[ndarray, "M L E"],
    home_LE: Int[ndarray, "L E"],
    num_ranks: int,
    ranks_per_node: int,
    slots: int,
    scope: Scope,
) -> Int64[ndarray, "M L"]:
    """Return the bound of plans with these homes, whatever their replicas and token split.

    Without slots it is the load of the busiest rank. With slots a domain (a node, or with scope "cluster" all ranks)
    cannot get below its mean, nor below the smallest T for which its experts fit into its slots: an expert with load x
    needs at least ceil(x / T) instances.
    """
    if slots == 0 or num_ranks == 1:
        return home_rank_load(load_MLE, home_LE, num_ranks).max(axis=2)
    size = ranks_per_node if scope == "node" else num_ranks
    domain_LE = home_LE // size
    num_domains = num_ranks // size
    domain_MLX = home_rank_load(load_MLE, domain_LE, num_domains)
    lowest_MLX = -(-domain_MLX // size)
    for domain in range(num_domains):
        inside_LE = domain_LE == domain
        lowest_MLX[:, :, domain] = _instances_bound(load_MLE, inside_LE, lowest_MLX[:, :, domain], size * slots)
    return lowest_MLX.max(axis=2)


def _instances_bound(load_MLE: ndarray, inside_LE: ndarray, lowest_ML: ndarray, spare: int) -> ndarray:
    """Return the smallest T >= `lowest_ML` with sum of (ceil(load / T) - 1) <= `spare` replicas, by bisection."""
    load_MLE = np.where(inside_LE, load_MLE, 0)

    def copies(t_ML: ndarray) -> ndarray:
        return np.maximum(-(-load_MLE // np.maximum(t_ML, 1)[:, :, None]) - 1, 0).sum(axis=2)

    low_ML, high_ML = lowest_ML.copy(), np.maximum(lowest_ML, load_MLE.max(axis=2))
    if (copies(low_ML) <= spare).all():
        return low_ML
    while (low_ML < high_ML).any():
        middle_ML = (low_ML + high_ML) // 2
        enough_ML = copies(middle_ML) <= spare
        high_ML = np.where(enough_ML, middle_ML, high_ML)
        low_ML = np.where(enough_ML, low_ML, np.minimum(middle_ML + 1, high_ML))
    return high_ML


def any_homes_bound(
    load_MLE: Int64[ndarray, "M L E"], num_ranks: int, ranks_per_node: int, slots: int, scope: Scope
) -> Int64[ndarray, "M L"]:
    """Return the bound of plans with any homes, equally many experts per rank, for each micro-batch alone.

    It is the largest of three loads of a domain (with slots a node or the cluster, else a rank), per rank: the mean;
    the heaviest expert beside the lightest; two of the D + 1 heaviest (two must share one of D domains) beside those.
    """
    E = load_MLE.shape[2]
    size = 1 if slots == 0 else (ranks_per_node if scope == "node" else num_ranks)
    domains, per_domain = num_ranks // size, E * size // num_ranks
    bound_ML = -(-load_MLE.sum(axis=2) // num_ranks)
    if domains == 1:
        return bound_ML
    heavy_MLE = -np.sort(-load_MLE, axis=2)
    fullest_ML = heavy_MLE[..., 0] + heavy_MLE[..., E - per_domain + 1 :].sum(axis=2)
    if per_domain >= 2:
        pair_ML = heavy_MLE[..., domains - 1] + heavy_MLE[..., domains]
        fullest_ML = np.maximum(fullest_ML, pair_ML + heavy_MLE[..., E - per_domain + 2 :].sum(axis=2))
    return np.maximum(bound_ML, -(-fullest_ML // size))
