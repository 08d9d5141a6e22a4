"""Sample locality: source ranks of samples with fewer tokens across nodes (ReLibra, arXiv 2605.08639).

Micro-batches and the balance of attention are kept: samples exchange ranks only with samples of similar length. A
sample has one rank in all layers, because its activations are there.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

LENGTH_BUCKET = 1.1
"""Largest ratio of lengths of samples that exchange ranks."""
MOST_AT_ONCE = 512
"""Most samples of a bucket: assignment takes cubic time."""


def place_samples(
    share_SLN: Float32[ndarray, "S L N"],
    micro_batch_S: Int[ndarray, " S"],
    rank_S: Int[ndarray, " S"],
    length_S: Int64[ndarray, " S"],
    ranks_per_node: int,
) -> Int32[ndarray, " S"]:
    """Return source ranks with most token-slots on the node of their expert's home, permuted in each micro-batch.

    share_SLN   token-slots of each sample at the experts of each node, per layer
    returns     rank of each sample: a permutation of the old ranks in each micro-batch and length bucket
    """
    gain_SN = share_SLN.sum(axis=1, dtype=np.float64)
    rank_S = rank_S.astype(np.int32)
    if gain_SN.shape[1] < 2:
        return rank_S
    order = np.lexsort((np.arange(len(length_S)), length_S, micro_batch_S))
    order = order[micro_batch_S[order] >= 0]
    start = 0
    for stop in range(1, len(order) + 1):
        same = stop < len(order) and micro_batch_S[order[stop]] == micro_batch_S[order[start]]
        if same and stop - start < MOST_AT_ONCE and length_S[order[stop]] <= LENGTH_BUCKET * length_S[order[start]]:
            continue
        bucket = order[start:stop]
        ranks = np.sort(rank_S[bucket])
        _, place = linear_sum_assignment(gain_SN[bucket][:, ranks // ranks_per_node], maximize=True)
        dealt = ranks[place]
        nodes_before, nodes_after = rank_S[bucket] // ranks_per_node, dealt // ranks_per_node
        if gain_SN[bucket, nodes_after].sum() > gain_SN[bucket, nodes_before].sum():
            rank_S[bucket] = dealt
        start = stop
    return rank_S
