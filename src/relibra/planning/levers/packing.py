"""Packing: assign samples to micro-batches so that no node is too full in any layer, and no rank attends too long.

No weights move. The loss of a step is normalised over all its tokens, so the micro-batch of a sample does not change
the gradient sum. Homes are given; samples of similar length are swapped between micro-batches, or moved into
room, by annealing the sum over micro-batches of the fullest node of each layer and the longest attention of a rank.
Tokens and attention cost (sum of squared lengths) of every rank are limited. (After RoutePack, arXiv 2608.12146, which
balances ranks and optimizer steps; here nodes, because replicas balance their ranks.)
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.costs.compute import sample_attention_seconds
from relibra.planning.costs.exchange import rows_per_crossing
from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.random_numbers import below, random_bits, uniform
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand

_PACKING_PROPOSALS, _LEAST_PACKING_PROPOSALS = 400_000, 4_000
"""Proposals of a step, divided among its groups by their samples, and the fewest of a group."""

_TEMPERATURE = (1e-4, 1e-6)
"""First and last temperature, as a share of the sum of mean node loads."""
_WINDOW = 24
"""A sample is swapped with one of this many neighbours in length on either side, unless it is to reach farther."""
_TOKENS, _SQUARES, _ATTENTION = 0, 1, 2
"""What is counted per rank, axis Y: tokens, squared lengths, and the price of attention."""
_ALL_TOKENS = 2
"""Limits, axis Z: tokens and squared lengths of a rank, tokens of a micro-batch."""


def pack_groups(request: PlacementRequest, demand: ScheduledDemand, home_LE: Int[ndarray, "L E"]) -> ScheduledDemand:
    """Pack the micro-batches of each group (mini-batch, expert-data-parallel group); a sample stays in its group."""
    cluster = request.cluster
    limits = ScheduleLimits.of_demand(demand, rank_tokens=request.budget.rank_tokens)
    load_SLN = node_loads(demand, home_LE, cluster.ranks_per_node, cluster.num_nodes)
    attention_S = _attention_prices(request, demand)
    micro_batch_S, rank_S = demand.micro_batch_S.astype(np.int32), demand.rank_S.astype(np.int32)
    M = len(demand.load_MLE)
    group_M = np.zeros(M, dtype=np.int32) if demand.group_M is None else demand.group_M
    group_S = np.append(group_M, -1)[micro_batch_S]  # -1, left out, is the last entry
    in_groups = max(1, int((group_S >= 0).sum()))
    for group in range(int(group_M.max(initial=-1)) + 1):
        samples = np.flatnonzero(group_S == group)
        micro_batch_S[samples], rank_S[samples] = pack_samples(
            load_SLN[samples],
            micro_batch_S[samples],
            rank_S[samples],
            demand.length_S[samples],
            cluster.num_ranks,
            group_M == group,
            limits=limits,
            squares_S=demand.attention_S[samples],
            attention_S=attention_S[samples],
            proposals=max(_LEAST_PACKING_PROPOSALS, _PACKING_PROPOSALS * len(samples) // in_groups),
            seed=0,
        )
    return demand.with_schedule(micro_batch_S, rank_S, cluster.num_ranks, M)


def _attention_prices(request: PlacementRequest, demand: ScheduledDemand) -> Float64[ndarray, " S"]:
    """Return attention seconds of each sample over all layers / seconds of one token-slot on a node.

    Replicas even out the ranks of a node, so a token-slot costs the node 3 x the expert's flops and 4 rows times the
    share that comes from other nodes, both divided by the ranks per node.
    """
    cluster, expert = request.cluster, request.expert
    remote = (cluster.num_nodes - 1) / cluster.num_nodes
    experts = 3 * expert.flops_per_token_slot / cluster.flops_per_second
    remote *= rows_per_crossing(cluster, demand, request.previous.home_LE)
    rows = 4 * remote * expert.row_bytes / cluster.inter_receive.bytes_per_second
    passes = 3 * len(demand.layer_ids)
    attention_S = passes * sample_attention_seconds(demand, cluster, expert)
    return attention_S / ((experts + rows) / cluster.ranks_per_node)


def node_loads(
    demand: ScheduledDemand, home_LE: Int[ndarray, "L E"], ranks_per_node: int, num_nodes: int
) -> Float32[ndarray, "S L N"]:
    """Return each sample's token-slots at the experts of each node."""
    S, L, _ = demand.counts_SLE.shape
    load_SLN = np.zeros((S, L, num_nodes), dtype=np.float32)
    _add_to_nodes(demand.counts_SLE, home_LE // ranks_per_node, load_SLN)
    return load_SLN


@compiled
@no_type_check
def _add_to_nodes(counts_SLE, node_LE, load_SLN) -> None:
    S, L, E = counts_SLE.shape
    for s in range(S):
        for layer in range(L):
            for e in range(E):
                load_SLN[s, layer, node_LE[layer, e]] += counts_SLE[s, layer, e]


def pack_samples(
    load_SLN: Float32[ndarray, "S L N"],
    micro_batch_S: Int[ndarray, " S"],
    rank_S: Int[ndarray, " S"],
    length_S: Int64[ndarray, " S"],
    num_ranks: int,
    open_M: Bool[ndarray, " M"],
    *,
    limits: ScheduleLimits,
    attention_S: Float64[ndarray, " S"],
    proposals: int,
    seed: int,
    keep_ranks: bool = False,
    keep_counts: bool = False,
    far_swaps: bool = False,
    squares_S: Int64[ndarray, " S"] | None = None,
) -> tuple[Int32[ndarray, " S"], Int32[ndarray, " S"]]:
    """Return micro-batch and rank of each sample, improved from a given schedule; micro-batch -1 stays -1.

    load_SLN      token-slots of each sample at the experts of each node, per layer
    open_M        micro-batches that samples may move to
    limits        the given schedule is within them, and so is the result: a rank with more than one sample never
                  exceeds its tokens or its attention
    attention_S   price of each sample's attention in all layers, in token-slots of the fullest node; 0: not priced
    keep_ranks    samples stay on their rank and change their micro-batch only
    keep_counts   samples are swapped, never moved: every rank keeps the number of its samples in each micro-batch
    far_swaps     one swap in four reaches beyond the neighbours in length: for steps in which these are all of one
                  task, or long samples are few
    squares_S     squared length of each sample, for the limit of attention; None: that of `length_S`
    returns       micro-batch and rank of each sample; swapped samples also swap ranks, a moved one goes to the rank
                  with the fewest tokens. No rank with samples loses its last one
    """
    micro_batch_S, rank_S = micro_batch_S.astype(np.int32), rank_S.astype(np.int32)
    movable = np.flatnonzero((micro_batch_S >= 0) & np.append(open_M, False)[micro_batch_S])
    num_micro_batches = len(open_M)
    if num_micro_batches < 2 or load_SLN.shape[2] < 2 or len(movable) < 2 or not load_SLN.any():
        return micro_batch_S, rank_S
    squares_S = length_S**2 if squares_S is None else squares_S
    cost_SY = np.stack([length_S, squares_S, attention_S], axis=1).astype(np.float64)
    cost_MRY = np.zeros((num_micro_batches, num_ranks, 3))
    np.add.at(cost_MRY, (micro_batch_S[movable], rank_S[movable]), cost_SY[movable])
    count_MR = np.zeros((num_micro_batches, num_ranks), dtype=np.int64)
    np.add.at(count_MR, (micro_batch_S[movable], rank_S[movable]), 1)
    load_MLN = np.zeros((num_micro_batches, *load_SLN.shape[1:]))
    for s in movable:
        load_MLN[micro_batch_S[s]] += load_SLN[s]
    keys = (length_S[movable], rank_S[movable]) if keep_ranks else (length_S[movable],)  # the last one sorts first
    by_length = movable[np.lexsort(keys)]
    most_Z = np.array([limits.rank_tokens, limits.rank_attention, limits.micro_batch_tokens], dtype=np.float64)
    _pack(
        load_SLN, by_length, micro_batch_S, rank_S, cost_SY, most_Z, cost_MRY, count_MR, load_MLN,
        np.flatnonzero(open_M), proposals, seed, keep_ranks, keep_counts, far_swaps,
    )  # fmt: skip
    return micro_batch_S, rank_S


@compiled
@no_type_check
def _pack(
    load_SLN, by_length, micro_batch_S, rank_S, cost_SY, most_Z, cost_MRY, count_MR, load_MLN,
    open_X, proposals, seed, keep_ranks, keep_counts, far_swaps,
) -> None:  # fmt: skip
    _, L, N = load_MLN.shape
    state = np.array([np.uint64(seed) * np.uint64(2654435769) + np.uint64(7)])
    best_micro_batch_S, best_rank_S = micro_batch_S.copy(), rank_S.copy()
    total = load_MLN.sum() / N
    change, best = 0.0, 0.0
    nothing_LN, nothing_Y = np.zeros((L, N), np.float32), np.zeros(3)
    for proposal in range(proposals):
        if proposal % 256 == 0:
            temperature = total * _TEMPERATURE[0] * (_TEMPERATURE[1] / _TEMPERATURE[0]) ** (proposal / proposals)
        place = below(state, len(by_length))
        i, j = by_length[place], -1
        a, ra = micro_batch_S[i], rank_S[i]
        swap = random_bits(state) & np.uint64(7) != 0
        if swap or keep_counts:
            other = place + _distance(state, len(by_length), far_swaps)
            if other < 0 or other >= len(by_length):
                continue
            j = by_length[other]
            c, rc = micro_batch_S[j], rank_S[j]
        else:
            c = open_X[below(state, len(open_X))]
            rc = ra if keep_ranks else np.argmin(cost_MRY[c, :, _TOKENS])
        if a == c or (keep_ranks and ra != rc):
            continue
        moved_Y = cost_SY[i] - (cost_SY[j] if j >= 0 else nothing_Y)  # leaves a, enters c
        fewer = 1 if j < 0 else 0
        if count_MR[a, ra] == fewer:
            continue  # the rank would have no sample
        if not _fits(cost_MRY[a], ra, -moved_Y, count_MR[a, ra] - fewer, most_Z):
            continue
        if not _fits(cost_MRY[c], rc, moved_Y, count_MR[c, rc] + fewer, most_Z):
            continue
        taken_LN = load_SLN[j] if j >= 0 else nothing_LN
        rise = _rise(load_MLN[a], load_MLN[c], load_SLN[i], taken_LN)
        rise += _attention_rise(cost_MRY[a], ra, -moved_Y) + _attention_rise(cost_MRY[c], rc, moved_Y)
        if rise > 0 and uniform(state) >= np.exp(-rise / temperature):
            continue
        load_MLN[a] += taken_LN - load_SLN[i]
        load_MLN[c] += load_SLN[i] - taken_LN
        cost_MRY[a, ra] -= moved_Y
        cost_MRY[c, rc] += moved_Y
        count_MR[a, ra] -= fewer
        count_MR[c, rc] += fewer
        if j >= 0:
            micro_batch_S[j], rank_S[j] = a, ra
        micro_batch_S[i], rank_S[i] = c, rc
        change += rise
        if change < best - 1e-6 * total / proposals:
            best = change
            best_micro_batch_S[:], best_rank_S[:] = micro_batch_S, rank_S
    micro_batch_S[:], rank_S[:] = best_micro_batch_S, best_rank_S


@compiled
@no_type_check
def _distance(state, samples, far_swaps) -> int:
    """Return the distance, in order of length, from a sample to the one that it is to be swapped with."""
    reach = _WINDOW
    if far_swaps and random_bits(state) & np.uint64(3) == 0:
        reach = np.int64(_WINDOW * max(1.0, samples / _WINDOW) ** uniform(state))  # as often in each octave
    return below(state, 2 * reach + 1) - reach


@compiled
@no_type_check
def _fits(cost_RY, rank, enters_Y, count, most_Z) -> bool:
    """Return whether a micro-batch and one of its ranks stay within limits; a single sample may exceed a rank's."""
    if enters_Y[_TOKENS] > 0 and cost_RY[:, _TOKENS].sum() + enters_Y[_TOKENS] > most_Z[_ALL_TOKENS]:
        return False
    if count <= 1:
        return True
    tokens, squares = cost_RY[rank, _TOKENS] + enters_Y[_TOKENS], cost_RY[rank, _SQUARES] + enters_Y[_SQUARES]
    return tokens <= most_Z[_TOKENS] and squares <= most_Z[_SQUARES]


@compiled
@no_type_check
def _attention_rise(cost_RY, rank, enters_Y) -> float:
    """Return by how much the longest attention of a micro-batch rises when samples enter and leave a rank."""
    others = 0.0
    for r in range(len(cost_RY)):
        if r != rank:
            others = max(others, cost_RY[r, _ATTENTION])
    old = cost_RY[rank, _ATTENTION]
    return max(others, old + enters_Y[_ATTENTION]) - max(others, old)


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
