"""Packing: assign samples to micro-batches so that no node is too full in any layer.

No weights move. The loss of a step is normalised over all its tokens, so the micro-batch of a sample does not change
the gradient sum. Homes are given; samples of similar length are swapped between micro-batches, or moved into
room, by annealing the sum over micro-batches and layers of the fullest node. Tokens and attention cost
(sum of squared lengths) of a micro-batch are limited. (After RoutePack, arXiv 2608.12146, which balances ranks and
optimizer steps; here nodes, because replicas balance their ranks.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Int64
from numpy import ndarray

from relibra.planning.search.random_numbers import below, random_bits, uniform
from relibra.routing.compiled import compiled

_TEMPERATURE = (1e-4, 1e-6)
"""First and last temperature, as a share of the sum of mean node loads."""
_WINDOW = 24
"""A sample is swapped with one of this many neighbours in length on either side."""


@dataclass(frozen=True, kw_only=True)
class PackingLimits:
    """Limits of a micro-batch: sum of its sample lengths, and of their squares (attention cost)."""

    tokens: float
    attention: float

    @classmethod
    def of_schedule(
        cls,
        micro_batch_S: Int[ndarray, " S"],
        length_S: Int64[ndarray, " S"],
        *,
        token_slack: float,
        attention_slack: float,
    ) -> PackingLimits:
        """Return the largest micro-batch of a schedule plus the slacks."""
        kept = micro_batch_S >= 0
        tokens_M = np.bincount(micro_batch_S[kept], weights=length_S[kept])
        attention_M = np.bincount(micro_batch_S[kept], weights=length_S[kept].astype(np.float64) ** 2)
        return cls(
            tokens=tokens_M.max(initial=0) * (1 + token_slack),
            attention=attention_M.max(initial=0) * (1 + attention_slack),
        )


def pack_samples(
    share_SLN: Float32[ndarray, "S L N"],
    micro_batch_S: Int[ndarray, " S"],
    rank_S: Int[ndarray, " S"],
    length_S: Int64[ndarray, " S"],
    num_ranks: int,
    open_M: Bool[ndarray, " M"],
    *,
    limits: PackingLimits,
    proposals: int,
    seed: int,
) -> tuple[Int32[ndarray, " S"], Int32[ndarray, " S"]]:
    """Return micro-batch and rank of each sample, improved from a given schedule; micro-batch -1 is kept.

    share_SLN   token-slots of each sample at the experts of each node, per layer
    length_S    tokens (or token-slots: any unit that is proportional)
    open_M      micro-batches that samples may move to
    limits      of every micro-batch; the given schedule is within them
    returns     micro-batch and rank of each sample; swapped samples also swap ranks, a moved one goes to the rank with
                the fewest tokens
    """
    micro_batch_S, rank_S = micro_batch_S.astype(np.int32), rank_S.astype(np.int32)
    kept = np.flatnonzero((micro_batch_S >= 0) & np.append(open_M, False)[micro_batch_S])
    num_micro_batches = len(open_M)
    if num_micro_batches < 2 or share_SLN.shape[2] < 2 or len(kept) < 2:
        return micro_batch_S, rank_S
    attention_S = length_S.astype(np.float64) ** 2
    tokens_M = np.bincount(micro_batch_S[kept], weights=length_S[kept], minlength=num_micro_batches)
    attention_M = np.bincount(micro_batch_S[kept], weights=attention_S[kept], minlength=num_micro_batches)
    by_length = kept[np.argsort(length_S[kept], kind="stable")]
    rank_tokens_MR = np.zeros((num_micro_batches, num_ranks))
    np.add.at(rank_tokens_MR, (micro_batch_S[kept], rank_S[kept]), length_S[kept])
    load_MLN = np.zeros((num_micro_batches, *share_SLN.shape[1:]))
    for s in kept:
        load_MLN[micro_batch_S[s]] += share_SLN[s]
    _pack(
        share_SLN, by_length, micro_batch_S, rank_S, np.stack([length_S.astype(np.float64), attention_S]),
        np.array([limits.tokens, limits.attention]), np.stack([tokens_M, attention_M]), rank_tokens_MR, load_MLN,
        np.flatnonzero(open_M), proposals, seed,
    )  # fmt: skip
    return micro_batch_S, rank_S


@compiled
@no_type_check
def _pack(
    share_SLN,
    by_length,
    micro_batch_S,
    rank_S,
    cost_2S,
    limits,
    cost_2M,
    rank_tokens_MR,
    load_MLN,
    open_X,
    proposals,
    seed,
) -> None:
    _, L, N = load_MLN.shape
    state = np.array([np.uint64(seed) * np.uint64(2654435769) + np.uint64(7)])
    best_micro_batch_S, best_rank_S = micro_batch_S.copy(), rank_S.copy()
    total = load_MLN.sum() / N
    change, best = 0.0, 0.0
    nothing = np.zeros((L, N), np.float32)
    for proposal in range(proposals):
        if proposal % 256 == 0:
            temperature = total * _TEMPERATURE[0] * (_TEMPERATURE[1] / _TEMPERATURE[0]) ** (proposal / proposals)
        place = below(state, len(by_length))
        i, j = by_length[place], -1
        a = micro_batch_S[i]
        if random_bits(state) & np.uint64(7):
            other = place + below(state, 2 * _WINDOW + 1) - _WINDOW
            if other < 0 or other >= len(by_length):
                continue
            j = by_length[other]
            c = micro_batch_S[j]
        else:
            c = open_X[below(state, len(open_X))]
        if a == c:
            continue
        fits = True
        for k in range(2):
            d = (cost_2S[k, j] if j >= 0 else 0.0) - cost_2S[k, i]
            fits = fits and cost_2M[k, a] + d <= limits[k] and cost_2M[k, c] - d <= limits[k]
        if not fits:
            continue
        taken_LN = share_SLN[j] if j >= 0 else nothing
        rise = _rise(load_MLN[a], load_MLN[c], share_SLN[i], taken_LN)
        if rise > 0 and uniform(state) >= np.exp(-rise / temperature):
            continue
        for layer in range(L):
            for n in range(N):
                d = taken_LN[layer, n] - share_SLN[i, layer, n]
                load_MLN[a, layer, n] += d
                load_MLN[c, layer, n] -= d
        to = rank_S[j] if j >= 0 else np.argmin(rank_tokens_MR[c])
        for k in range(2):
            d = (cost_2S[k, j] if j >= 0 else 0.0) - cost_2S[k, i]
            cost_2M[k, a] += d
            cost_2M[k, c] -= d
        rank_tokens_MR[a, rank_S[i]] -= cost_2S[0, i]
        rank_tokens_MR[c, to] += cost_2S[0, i]
        if j >= 0:
            rank_tokens_MR[c, to] -= cost_2S[0, j]
            rank_tokens_MR[a, rank_S[i]] += cost_2S[0, j]
            micro_batch_S[j], rank_S[j] = a, rank_S[i]
        micro_batch_S[i], rank_S[i] = c, to
        change += rise
        if change < best - 1e-6 * total / proposals:
            best = change
            best_micro_batch_S[:], best_rank_S[:] = micro_batch_S, rank_S
    micro_batch_S[:], rank_S[:] = best_micro_batch_S, best_rank_S


@compiled
@no_type_check
def _rise(load_a_LN, load_c_LN, leaves_LN, enters_LN) -> float:
    """Return by how much the two fullest-node sums rise when `leaves` goes from a to c and `enters` from c to a."""
    rise = 0.0
    L, N = load_a_LN.shape
    for layer in range(L):
        old_a, old_c, new_a, new_c = 0.0, 0.0, 0.0, 0.0
        for n in range(N):
            d = enters_LN[layer, n] - leaves_LN[layer, n]
            x, y = load_a_LN[layer, n], load_c_LN[layer, n]
            old_a, old_c = max(old_a, x), max(old_c, y)
            new_a, new_c = max(new_a, x + d), max(new_c, y - d)
        rise += new_a + new_c - old_a - old_c
    return rise
