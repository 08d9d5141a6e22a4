"""Homes: exact costs, optimum on tiny cases, legal and never worse on any."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.levers.homes import SwapPrices, heaviest_first
from relibra.planning.relibra_paper.annealing import COLD, WARM, anneal_nodes, home_cost
from relibra.planning.relibra_paper.nodes_and_ranks import (
    busiest,
    place_homes,
    ranks_inside_nodes,
)


def plain_cost(node_E, load_ME, source_MNE, previous_E, network, move):
    M, N, E = source_MNE.shape
    cost = move * sum(node_E[e] != previous_E[e] for e in range(E))
    for m in range(M):
        load, into, out = np.zeros(N), np.zeros(N), np.zeros(N)
        for e in range(E):
            load[node_E[e]] += load_ME[m, e]
            for n in range(N):
                if n != node_E[e]:
                    out[n] += source_MNE[m, n, e]
                    into[node_E[e]] += source_MNE[m, n, e]
        cost += load.max() + network * np.maximum(into, out).max()
    return cost


@st.composite
def problems(draw):
    nodes, per_node, M = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    E = nodes * per_node
    source_MNE = rng.integers(0, 60, (M, nodes, E)) * (rng.random((M, nodes, E)) < draw(st.sampled_from([0.1, 1.0])))
    network, move = draw(st.sampled_from([0.0, 0.5, 3.0])), draw(st.sampled_from([0.0, 20.0]))
    previous_E = rng.permutation(np.repeat(np.arange(nodes), per_node))
    return source_MNE.sum(axis=1), source_MNE, previous_E, network, move


@given(problems(), st.integers(0, 9))
def test_annealing_never_ends_above_its_start(problem, seed):
    nodes = problem[1].shape[1]
    start_E = heaviest_first(problem[0].sum(axis=0), nodes)
    found_E = anneal_nodes(start_E, *problem, temperature=COLD, proposals=600, seed=seed)
    assert (np.bincount(found_E, minlength=nodes) == len(found_E) // nodes).all()
    assert home_cost(found_E, *problem) == pytest.approx(plain_cost(found_E, *problem))
    assert home_cost(found_E, *problem) <= home_cost(start_E, *problem) + 1e-9
    again_E = anneal_nodes(start_E, *problem, temperature=COLD, proposals=600, seed=seed)
    assert (found_E == again_E).all()


@pytest.mark.parametrize(("network", "move"), [(0.0, 0.0), (1.0, 0.0), (0.5, 10.0)])
def test_annealing_is_close_to_the_optimum_of_small_cases(network, move):
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(6):
        source_MNE = rng.integers(0, 100, (4, 2, 10))
        previous_E = np.repeat([0, 1], 5)
        problem = (source_MNE.sum(axis=1), source_MNE, previous_E, network, move)
        costs = []
        for first in combinations(range(10), 5):
            node_E = np.ones(10, dtype=int)
            node_E[list(first)] = 0
            costs.append(home_cost(node_E, *problem))
        found_E = anneal_nodes(previous_E, *problem, temperature=COLD, proposals=5000, seed=0)
        ratios.append(home_cost(found_E, *problem) / min(costs))
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.01
    assert np.mean(ratios) <= 1.003


def test_individual_micro_batches_count_not_their_sum():
    """Experts 0 and 1 are hot in turn, 2 and 3 too: all pairings are even on the sum, some in each micro-batch."""
    load_ME = np.array([[90, 10, 90, 10], [10, 90, 10, 90]], dtype=np.int64)
    source_MNE = np.zeros((2, 2, 4), dtype=np.int64)
    home_E = place_homes(
        load_ME, source_MNE, np.array([0, 1, 0, 1]), 1, prices=SwapPrices(), temperature=COLD, proposals=500, seed=0
    )
    assert home_E[0] != home_E[2]
    assert busiest(load_ME, home_E) == 200


def test_homes_stay_when_moving_costs_more_than_it_brings():
    load_ME = np.array([[50, 51, 49, 50]], dtype=np.int64)
    previous_E = np.array([0, 0, 1, 1])
    for move, moved in ((0.0, True), (10.0, False)):
        home_E = place_homes(
            load_ME,
            np.zeros((1, 2, 4), dtype=np.int64),
            previous_E,
            1,
            prices=SwapPrices(move=move),
            temperature=WARM,
            proposals=300,
            seed=0,
        )
        assert (home_E != previous_E).any() == moved


@given(problems(), st.integers(1, 3))
def test_ranks_inside_nodes_are_as_even_as_heaviest_first(problem, ranks_per_node):
    load_ME, source_MNE, node_E, _, _ = problem
    node_E, load_ME = np.repeat(node_E, ranks_per_node), np.repeat(load_ME, ranks_per_node, axis=1)
    nodes, sizes = source_MNE.shape[1], {"move": 0.0, "proposals": 300, "seed": 0}
    home_E = ranks_inside_nodes(load_ME, node_E, node_E * ranks_per_node, ranks_per_node, nodes, **sizes)
    assert (np.bincount(home_E, minlength=nodes * ranks_per_node) == len(node_E) // nodes // ranks_per_node).all()
    assert (home_E // ranks_per_node == node_E).all()
    for node in range(nodes):
        here = node_E == node
        plain_E = heaviest_first(load_ME[:, here].sum(axis=0), ranks_per_node)
        assert busiest(load_ME[:, here], home_E[here] - node * ranks_per_node) <= busiest(load_ME[:, here], plain_E)
    # planned again from there, nobody moves
    assert (ranks_inside_nodes(load_ME, node_E, home_E, ranks_per_node, nodes, **sizes) == home_E).all()
