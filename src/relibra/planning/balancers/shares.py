"""Shares: token-slots that each instance of an expert computes under fixed homes and replicas, as exact integers.

Three rules of systems with static replicas: *even* (each copy the same), *optimal* (least load of the busiest rank) and
*local first* (copies on the own node, if any). *Optimal* starts from even shares (`planning.levers.instance_flow`).
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int16, Int32
from numpy import ndarray

from relibra.planning.levers.instance_flow import empty_instances, list_instances, lower_busiest_rank
from relibra.routing.compiled import compiled


def even_quotas(
    load_ME: Int[ndarray, "M E"],
    home_E: Int[ndarray, " E"],
    home_copies_E: Int[ndarray, " E"],
    replica_RB: Int16[ndarray, "R B"],
    copies_RB: Int[ndarray, "R B"],
) -> Int32[ndarray, "M R B"]:
    """Return quotas with the same share for each physical copy of an expert (EPLB and its family).

    home_copies_E, copies_RB   physical copies in each instance: copies of an expert on one rank are one instance
    returns                    token-slots per replica; leftovers go to the largest remainders (ties: home, lower rank).
                               The home computes an expert without copies
    """
    quota_MRB = np.zeros((len(load_ME), *replica_RB.shape), dtype=np.int32)
    _even(load_ME, _instances(home_E, replica_RB), home_copies_E, copies_RB, quota_MRB)
    return quota_MRB


def optimal_quotas(
    load_ME: Int[ndarray, "M E"], home_E: Int[ndarray, " E"], replica_RB: Int16[ndarray, "R B"]
) -> Int32[ndarray, "M R B"]:
    """Return quotas with the lowest load of the busiest rank that these instances allow.

    The linear program of LPLB and MicroMoE (arXiv 2511.16947), solved in integers (`lower_busiest_rank`).
    """
    ones_E, ones_RB = np.ones(len(home_E), dtype=np.int64), np.ones(replica_RB.shape, dtype=np.int64)
    quota_MRB = even_quotas(load_ME, home_E, ones_E, replica_RB, ones_RB)
    _balance(load_ME, home_E.astype(np.int64), replica_RB.astype(np.int64), quota_MRB)
    return quota_MRB


def local_first_quotas(
    tokens_MRE: Int[ndarray, "M R E"],
    home_E: Int[ndarray, " E"],
    home_copies_E: Int[ndarray, " E"],
    replica_RB: Int16[ndarray, "R B"],
    copies_RB: Int[ndarray, "R B"],
    ranks_per_node: int,
) -> Int32[ndarray, "M R B"]:
    """Return quotas that share each node's tokens evenly over its copies, or over all copies if it has none (LAER)."""
    M, R, _ = tokens_MRE.shape
    quota_MRB = np.zeros((M, *replica_RB.shape), dtype=np.int32)
    for node in range(R // ranks_per_node):
        here = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
        load_ME = tokens_MRE[:, here].sum(axis=1, dtype=np.int64)
        near_E = np.where(home_E // ranks_per_node == node, home_copies_E, 0)
        near_RB = np.zeros_like(copies_RB)
        near_RB[here] = copies_RB[here]
        near_copies_E = near_E.copy()
        np.add.at(near_copies_E, replica_RB[replica_RB >= 0], near_RB[replica_RB >= 0])
        expert_RB = np.maximum(replica_RB, 0)
        near_E = np.where(near_copies_E > 0, near_E, home_copies_E)
        near_RB = np.where(near_copies_E[expert_RB] > 0, near_RB, copies_RB)
        quota_MRB += even_quotas(load_ME, home_E, near_E, replica_RB, near_RB)
    return quota_MRB


def _instances(home_E: ndarray, replica_RB: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Return instances by expert, home first: starts per expert, then rank, flat slot (-1: home) and expert of each."""
    rank_X, slot_X = np.nonzero(replica_RB >= 0)
    E = len(home_E)
    expert_I = np.concatenate([np.arange(E), replica_RB[rank_X, slot_X]]).astype(np.int64)
    rank_I = np.concatenate([home_E, rank_X]).astype(np.int64)
    slot_I = np.concatenate([np.full(E, -1), rank_X * replica_RB.shape[1] + slot_X]).astype(np.int64)
    order = np.argsort(expert_I, kind="stable")
    starts = np.searchsorted(expert_I[order], np.arange(E + 1))
    return starts, rank_I[order], slot_I[order], expert_I[order]


@compiled
@no_type_check
def _even(load_ME, instances, home_copies_E, copies_RB, quota_MRB) -> None:
    starts, rank_I, slot_I, _ = instances
    B = copies_RB.shape[1]
    weight_I, remainder_I = np.empty(len(rank_I), np.int64), np.empty(len(rank_I), np.int64)
    for m in range(len(load_ME)):
        for e in range(len(starts) - 1):
            first, stop, load = starts[e], starts[e + 1], load_ME[m, e]
            if stop - first == 1 or load == 0:
                continue
            weights = 0
            for i in range(first, stop):
                s = slot_I[i]
                weight_I[i] = home_copies_E[e] if s < 0 else copies_RB[s // B, s % B]
                weights += weight_I[i]
            if weights == 0:
                continue
            left = load
            for i in range(first, stop):
                share = load * weight_I[i] // weights
                remainder_I[i] = load * weight_I[i] - share * weights
                left -= share
                if slot_I[i] >= 0:
                    quota_MRB[m, slot_I[i] // B, slot_I[i] % B] = share
            for _ in range(left):
                best = first
                for i in range(first + 1, stop):
                    if remainder_I[i] > remainder_I[best]:
                        best = i
                remainder_I[best] = -1
                if slot_I[best] >= 0:
                    quota_MRB[m, slot_I[best] // B, slot_I[best] % B] += 1


@compiled
@no_type_check
def _balance(load_ME, home_E, replica_RB, quota_MRB) -> None:
    """Improve the quotas until the busiest rank is as low as the instances allow."""
    M, R, B = quota_MRB.shape
    instances = empty_instances(len(home_E), R)
    tokens_ER, load_R = instances.tokens_ER, instances.load_R
    list_instances(home_E, replica_RB, instances)
    for m in range(M):
        tokens_ER[:] = 0
        for e in range(len(home_E)):
            tokens_ER[e, home_E[e]] = load_ME[m, e]
        for r in range(R):
            for b in range(B):
                e = replica_RB[r, b]
                if e >= 0:
                    tokens_ER[e, r] += quota_MRB[m, r, b]
                    tokens_ER[e, home_E[e]] -= quota_MRB[m, r, b]
        load_R[:] = tokens_ER.sum(axis=0)
        lower_busiest_rank(instances, -(-load_R.sum() // R), R)
        for r in range(R):
            for b in range(B):
                if replica_RB[r, b] >= 0:
                    quota_MRB[m, r, b] = tokens_ER[replica_RB[r, b], r]
