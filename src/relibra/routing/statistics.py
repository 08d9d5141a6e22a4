"""Load imbalance: skew, violation, stability over time, co-activation.

Every docstring names what is compared, *experts* or *ranks*. Loads are token-slots; leading axes are free (micro-batch,
layer, ...) unless a shape is given. Entries without load count as perfectly even.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int64, Shaped
from numpy import ndarray

from relibra.errors import ClusterError
from relibra.routing.array_sizes import check_array_size
from relibra.routing.compiled import compiled
from relibra.routing.trace import RoutingTrace


def contiguous_homes(num_experts: int, num_ranks: int) -> Int64[ndarray, " E"]:
    """Return the rank of each expert in the static layout: rank r holds experts r E/R ... (r + 1) E/R - 1.

    raises    ClusterError when the ranks do not divide the experts

    >>> contiguous_homes(4, 2).tolist()
    [0, 0, 1, 1]
    """
    if num_ranks < 1 or num_experts % num_ranks:
        raise ClusterError(
            f"{num_experts} experts cannot be divided evenly among {num_ranks} ranks: choose a number of ranks that "
            f"divides {num_experts}"
        )
    return np.repeat(np.arange(num_ranks), num_experts // num_ranks)


def rank_load(
    load_E: Shaped[ndarray, "*batch E"], home_E: Int[ndarray, " E"], num_ranks: int
) -> Shaped[ndarray, "*batch R"]:
    """Return the load of the experts on each rank."""
    order = np.argsort(home_E, kind="stable")
    starts = np.searchsorted(home_E[order], np.arange(num_ranks))
    total = np.add.reduceat(np.append(load_E[..., order], np.zeros_like(load_E[..., :1]), axis=-1), starts, axis=-1)
    total[..., np.bincount(home_E, minlength=num_ranks) == 0] = 0  # reduceat has no empty segments
    return total


def skew(load_X: Shaped[ndarray, "*batch X"]) -> Float64[ndarray, "*batch"]:
    """Return max / mean over the last axis: *rank* skew of rank loads, *expert* skew of expert loads; 1 is even.

    >>> skew(np.array([[3, 1], [0, 0]])).tolist()
    [1.5, 1.0]
    """
    mean = load_X.mean(axis=-1, dtype=np.float64)
    return np.divide(load_X.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)


def rank_skew(load_E: Shaped[ndarray, "*batch E"], num_ranks: int) -> Float64[ndarray, "*batch"]:
    """Return the *rank* skew of expert loads under the static layout (`contiguous_homes`)."""
    return skew(rank_load(load_E, contiguous_homes(load_E.shape[-1], num_ranks), num_ranks))


def max_vio(load_E: Shaped[ndarray, "*batch E"]) -> Float64[ndarray, "*batch"]:
    """Return the largest violation `load_e / sum(load) * E - 1` over *experts*; 0 is even (arXiv 2408.15664)."""
    return skew(load_E) - 1.0


def coefficient_of_variation(load_X: Shaped[ndarray, "*batch X"]) -> Float64[ndarray, "*batch"]:
    """Return standard deviation / mean over the last axis (population form)."""
    mean = load_X.mean(axis=-1, dtype=np.float64)
    return np.divide(load_X.std(axis=-1, dtype=np.float64), mean, out=np.zeros_like(mean), where=mean > 0)


def co_activation(trace: RoutingTrace) -> Int64[ndarray, "L E E"]:
    """Count, per layer, how many tokens pick experts e and f together; the diagonal counts tokens per expert.

    Send-once volumes follow from these pairs: two experts of a token on one rank need one transfer.

    raises    TraceError for a trace that is not valid
    """
    trace.validate()  # the kernel does not check ids
    return count_pairs(trace.experts_TLK, trace.valid_T, trace.num_experts)


def count_pairs(
    experts_TLK: Shaped[ndarray, "T L K"], valid_T: Shaped[ndarray, " T"], num_experts: int
) -> Int64[ndarray, "L E E"]:
    """Return `co_activation` of validated routes; rows that are not valid are left out."""
    L, E = experts_TLK.shape[1], num_experts
    check_array_size("pairs of experts", 8, experts_TLK.nbytes, layers=L, experts=E, of_experts=E)
    pairs_LEE = np.zeros((L, E, E), dtype=np.int64)
    _count_pairs(experts_TLK, valid_T, pairs_LEE)
    return pairs_LEE


@compiled
@no_type_check
def _count_pairs(experts_TLK: ndarray, valid_T: ndarray, pairs_LEE: ndarray) -> None:
    T, L, K = experts_TLK.shape
    for t in range(T):
        if valid_T[t]:
            for layer in range(L):
                for j in range(K):
                    for k in range(K):
                        pairs_LEE[layer, experts_TLK[t, layer, j], experts_TLK[t, layer, k]] += 1
