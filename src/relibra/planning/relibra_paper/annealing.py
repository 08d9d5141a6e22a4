"""Simulated annealing of expert homes over nodes (ReLibra, arXiv 2605.08639), by swaps with delta evaluation.

The cost of a layer, in token-slots of the fullest node:

    F = sum over micro-batches [ max_n X + network max_n Y ] + move x (experts that change node)

with X[m,n] the load of node n and Y[m,n] the larger of what it receives from and sends to other nodes. While annealing,
max is replaced by the log-sum-exp LSE_b(x) = (1/b) log sum exp(b x), between max and max + log(N) / b, in units of
each micro-batch's mean. A swap changes two terms of each sum: O(M) per proposal. Returned is the best *exact* F seen.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.random_numbers import below, random_bits, uniform
from relibra.routing.compiled import compiled

COLD, WARM = 5e-3, 5e-4
"""First temperature, as a share of the cost of an even layer: from scratch, and from homes of the last step."""
_LAST_TEMPERATURE = 2e-5
"""Last temperature; it falls geometrically."""
_SHARPNESS = (20.0, 200.0)
"""First and last `b` of the log-sum-exp."""
_REFRESH = 256
"""Proposals between updates of temperature and sharpness; an update recomputes all sums, so rounding does not drift."""


def home_cost(
    node_E: Int[ndarray, " E"],
    load_ME: Int64[ndarray, "M E"],
    source_MNE: Int64[ndarray, "M N E"],
    previous_node_E: Int[ndarray, " E"],
    network: float,
    move: float,
) -> float:
    """Return the exact cost F of a layer, in token-slots."""
    M, N, E = source_MNE.shape
    on_node_EN = np.zeros((E, N), dtype=np.int64)
    on_node_EN[np.arange(E), node_E] = 1
    load_MN = load_ME @ on_node_EN
    local_MN = np.take_along_axis(source_MNE, np.broadcast_to(node_E, (M, 1, E)), axis=1)[:, 0] @ on_node_EN
    crossing_MN = np.maximum(load_MN, source_MNE.sum(axis=2)) - local_MN
    moved = int((node_E != previous_node_E).sum())
    return float(load_MN.max(axis=1).sum() + network * crossing_MN.max(axis=1).sum() + move * moved)


def anneal_nodes(
    start_E: Int[ndarray, " E"],
    load_ME: Int64[ndarray, "M E"],
    source_MNE: Int64[ndarray, "M N E"],
    previous_node_E: Int[ndarray, " E"],
    network: float,
    move: float,
    *,
    temperature: float,
    proposals: int,
    seed: int,
) -> Int64[ndarray, " E"]:
    """Return the best node of each expert found by swaps from `start_E`, by exact cost (may be the start).

    temperature   the first one, `COLD` or `WARM`
    """
    best_E = start_E.astype(np.int64)
    _anneal(
        best_E,
        load_ME.astype(np.float64),
        source_MNE,
        previous_node_E.astype(np.int64),
        float(network),
        float(move),
        temperature,
        proposals,
        seed,
    )
    return best_E


@compiled
@no_type_check
def _anneal(best_E, load_ME, source_MNE, previous_node_E, network, move, first, proposals, seed) -> None:
    M, N, E = source_MNE.shape
    k = E // N
    node_E = best_E.copy()
    member_Nk, place_E = _members(node_E, N)
    # two tables of the same shape: 0 is X, the load; 1 is Y, the crossing token-slots (unused without network weight)
    tables = 2 if network > 0 else 1
    weight_T = np.array([1.0, network])
    value_TMN, local_MN, sent_MN = _tables(node_E, load_ME, source_MNE, tables)
    power_TMN = np.zeros((2, M, N))
    new_TM4 = np.zeros((2, M, 4))  # values and powers of the two nodes of a swap, before it is accepted
    scale_TM, sum_TM = value_TMN.sum(axis=2) / N, np.zeros((2, M))
    total = scale_TM[0].sum() + (network * scale_TM[1].sum() if tables == 2 else 0.0)
    if total == 0.0:
        return
    moved = (node_E != previous_node_E).sum()
    best = _exact(value_TMN, weight_T, tables) + move * moved
    state = np.array([np.uint64(seed) * np.uint64(2654435769) + np.uint64(1)])
    smooth, temperature, sharpness = 0.0, 0.0, 0.0
    for proposal in range(proposals):
        if proposal % _REFRESH == 0:
            done = proposal / proposals
            temperature = total * first * (_LAST_TEMPERATURE / first) ** done
            sharpness = _SHARPNESS[0] * (_SHARPNESS[1] / _SHARPNESS[0]) ** done
            smooth = _refresh(value_TMN, power_TMN, sum_TM, scale_TM, weight_T, tables, sharpness)
        a, c = _two_nodes(state, value_TMN[0])
        if a == c:
            continue
        i, j = member_Nk[a, below(state, k)], member_Nk[c, below(state, k)]
        new = 0.0
        for m in range(M):
            d = load_ME[m, j] - load_ME[m, i]
            new_a, new_c = value_TMN[0, m, a] + d, value_TMN[0, m, c] - d
            new += _swap(0, m, a, c, new_a, new_c, power_TMN, sum_TM, scale_TM, sharpness, new_TM4)
            if tables == 2:
                new_a = max(new_a, sent_MN[m, a]) - local_MN[m, a] - source_MNE[m, a, j] + source_MNE[m, a, i]
                new_c = max(new_c, sent_MN[m, c]) - local_MN[m, c] - source_MNE[m, c, i] + source_MNE[m, c, j]
                new += network * _swap(1, m, a, c, new_a, new_c, power_TMN, sum_TM, scale_TM, sharpness, new_TM4)
        moves = int(c != previous_node_E[i]) + int(a != previous_node_E[j])
        moves -= int(a != previous_node_E[i]) + int(c != previous_node_E[j])
        rise = new - smooth + move * moves
        if rise > 0 and uniform(state) >= np.exp(-rise / temperature):
            continue
        _accept(a, c, i, j, tables, new_TM4, value_TMN, power_TMN, sum_TM, local_MN, source_MNE)
        smooth, moved = new, moved + moves
        node_E[i], node_E[j] = c, a
        member_Nk[a, place_E[i]], member_Nk[c, place_E[j]] = j, i
        place_E[i], place_E[j] = place_E[j], place_E[i]
        exact = _exact(value_TMN, weight_T, tables) + move * moved
        if exact < best:
            best = exact
            best_E[:] = node_E


@compiled
@no_type_check
def _members(node_E, num_nodes) -> tuple:
    """Return the experts of each node, and the position of each expert in its list."""
    member_Nk = np.zeros((num_nodes, len(node_E) // num_nodes), np.int64)
    place_E, filled_N = np.zeros(len(node_E), np.int64), np.zeros(num_nodes, np.int64)
    for e in range(len(node_E)):
        n = node_E[e]
        member_Nk[n, filled_N[n]] = e
        place_E[e] = filled_N[n]
        filled_N[n] += 1
    return member_Nk, place_E


@compiled
@no_type_check
def _tables(node_E, load_ME, source_MNE, tables) -> tuple:
    """Return X and Y, and the terms of Y: token-slots that stay on their node, and all that a node sends."""
    M, N, E = source_MNE.shape
    value_TMN, local_MN, sent_MN = np.zeros((2, M, N)), np.zeros((M, N)), np.zeros((M, N))
    for m in range(M):
        for e in range(E):
            value_TMN[0, m, node_E[e]] += load_ME[m, e]
            if tables == 2:
                local_MN[m, node_E[e]] += source_MNE[m, node_E[e], e]
                for n in range(N):
                    sent_MN[m, n] += source_MNE[m, n, e]
        for n in range(N):
            value_TMN[1, m, n] = max(value_TMN[0, m, n], sent_MN[m, n]) - local_MN[m, n]
    return value_TMN, local_MN, sent_MN


@compiled
@no_type_check
def _two_nodes(state, load_MN) -> tuple:
    """Return the fullest and lightest node of a random micro-batch or, half of the time, two random nodes."""
    M, N = load_MN.shape
    if random_bits(state) & np.uint64(1):
        m = below(state, M)
        return np.argmax(load_MN[m]), np.argmin(load_MN[m])
    return below(state, N), below(state, N)


@compiled
@no_type_check
def _accept(a, c, i, j, tables, new_TM4, value_TMN, power_TMN, sum_TM, local_MN, source_MNE) -> None:
    """Swap expert i of node a with expert j of node c in all sums."""
    for m in range(value_TMN.shape[1]):
        for t in range(tables):
            sum_TM[t, m] += new_TM4[t, m, 2] + new_TM4[t, m, 3] - power_TMN[t, m, a] - power_TMN[t, m, c]
            value_TMN[t, m, a], value_TMN[t, m, c] = new_TM4[t, m, 0], new_TM4[t, m, 1]
            power_TMN[t, m, a], power_TMN[t, m, c] = new_TM4[t, m, 2], new_TM4[t, m, 3]
        if tables == 2:
            local_MN[m, a] += source_MNE[m, a, j] - source_MNE[m, a, i]
            local_MN[m, c] += source_MNE[m, c, i] - source_MNE[m, c, j]


@compiled
@no_type_check
def _exact(value_TMN, weight_T, tables) -> float:
    cost = 0.0
    for t in range(tables):
        for m in range(value_TMN.shape[1]):
            cost += weight_T[t] * value_TMN[t, m].max()
    return cost


@compiled
@no_type_check
def _refresh(value_TMN, power_TMN, sum_TM, scale_TM, weight_T, tables, sharpness) -> float:
    """Recompute all powers and sums for a sharpness; return the smoothed cost without moves."""
    smooth = 0.0
    _, M, N = value_TMN.shape
    for t in range(tables):
        for m in range(M):
            sum_TM[t, m] = 0.0
            if scale_TM[t, m] == 0.0:
                continue
            for n in range(N):
                power_TMN[t, m, n] = _power(value_TMN[t, m, n], scale_TM[t, m], sharpness)
                sum_TM[t, m] += power_TMN[t, m, n]
            smooth += weight_T[t] * scale_TM[t, m] * np.log(sum_TM[t, m]) / sharpness
    return smooth


@compiled
@no_type_check
def _swap(t, m, a, c, new_a, new_c, power_TMN, sum_TM, scale_TM, sharpness, new_TM4) -> float:
    """Return the smoothed maximum of one micro-batch with new values of two nodes; write these to `new_TM4`."""
    scale = scale_TM[t, m]
    new_TM4[t, m, 0], new_TM4[t, m, 1] = new_a, new_c
    if scale == 0.0:
        return 0.0
    power_a, power_c = _power(new_a, scale, sharpness), _power(new_c, scale, sharpness)
    new_TM4[t, m, 2], new_TM4[t, m, 3] = power_a, power_c
    rest = sum_TM[t, m] - power_TMN[t, m, a] - power_TMN[t, m, c]
    return scale * np.log(max(rest, 0.0) + power_a + power_c) / sharpness


@compiled
@no_type_check
def _power(value, scale, sharpness) -> float:
    """Return exp(b (x / mean - 1)), the exponent clipped against overflow."""
    return np.exp(min(sharpness * (value / scale - 1.0), 600.0))
