"""New homes: swaps of two experts, between nodes and inside them, against slow references."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.levers.homes import (
    SwapPrices,
    deal_inside_nodes,
    heaviest_first,
    renumber_bins,
    swap_nodes,
    swap_ranks,
)
from relibra.planning.relibra_paper.annealing import home_cost
from tests.planning.relibra_paper.test_nodes_and_ranks import plain_cost

SWEEPS = 4


def swap_slowly(load_ME, source_MNE, before_E, network, move):
    """Try all pairs in order, with the whole cost recomputed for each; keep every swap that lowers it."""
    problem, node_E = (load_ME, source_MNE, before_E, network, move), before_E.tolist()
    for _ in range(SWEEPS):
        swapped = False
        for i in range(len(node_E)):
            for j in range(i + 1, len(node_E)):
                tried = node_E.copy()
                tried[i], tried[j] = node_E[j], node_E[i]
                if plain_cost(tried, *problem) < plain_cost(node_E, *problem):
                    node_E, swapped = tried, True
        if not swapped:
            break
    return node_E


@st.composite
def problems(draw):
    """Draw loads and prices that are exact in binary, so that sums in any order are equal."""
    nodes, per_node, M = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    source_MNE = rng.integers(0, draw(st.sampled_from([3, 60])), (M, nodes, nodes * per_node))
    before_E = rng.permutation(np.repeat(np.arange(nodes), per_node))
    prices = {"network": draw(st.sampled_from([0.0, 0.5, 3.0])), "move": draw(st.sampled_from([0.0, 4.0, 20.0]))}
    return source_MNE.sum(axis=1), source_MNE, before_E, prices


@given(problems())
def test_swaps_are_those_of_the_slow_reference(problem):
    load_ME, source_MNE, before_E, prices = problem
    node_E = swap_nodes(load_ME, source_MNE, before_E, SwapPrices(**prices))
    assert node_E.tolist() == swap_slowly(load_ME, source_MNE, before_E, **prices)
    assert np.bincount(node_E).tolist() == np.bincount(before_E).tolist()
    costs = [home_cost(nodes_E, load_ME, source_MNE, before_E, **prices) for nodes_E in (node_E, before_E)]
    assert costs[0] <= costs[1]
    assert costs[0] < costs[1] or (node_E == before_E).all()


@pytest.mark.parametrize(("move", "moved"), [(0.0, True), (14.0, True), (16.0, False)])
def test_a_swap_saves_more_than_its_moves_cost(move, moved):
    load_ME = np.array([[50, 40, 20, 10]])  # nodes of 90 and 30: a swap, two moves, saves 30 at most
    node_E = swap_nodes(load_ME, np.zeros((1, 2, 4), int), np.array([0, 0, 1, 1]), SwapPrices(network=0.0, move=move))
    assert (node_E != [0, 0, 1, 1]).any() == moved


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_dealing_inside_nodes_keeps_nodes_and_counts(nodes, per_node, per_rank, seed):
    rng = np.random.default_rng(seed)
    R = nodes * per_node
    home_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    node_E = rng.permutation(home_E // per_node)  # some experts come from other nodes
    load_E = rng.integers(0, 50, R * per_rank)
    dealt_E = deal_inside_nodes(load_E, node_E, home_E, R, per_node)
    assert (dealt_E // per_node == node_E).all()
    assert np.bincount(dealt_E, minlength=R).tolist() == [per_rank] * R
    for node in range(nodes):
        here = node_E == node
        bin_X = heaviest_first(load_E[here], per_node)
        tops = [np.bincount(ranks, load_E[here]).max() for ranks in (dealt_E[here] - node * per_node, bin_X)]
        assert tops[0] == tops[1]
    again_E = deal_inside_nodes(load_E, node_E, dealt_E, R, per_node)
    assert (again_E == dealt_E).all()


def cost_on_a_node(load_ME, home_E, before_E, R, move):
    """Return the loads of the fullest rank of each micro-batch, and the moves."""
    fullest = sum(np.bincount(home_E, load_E, minlength=R).max() for load_E in load_ME)
    return fullest + move * sum(now != then for now, then in zip(home_E, before_E, strict=True))


@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from([0.0, 2.0, 16.5]),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_swaps_of_ranks_are_those_of_a_slow_search(R, per_rank, micro_batches, move, seed):
    rng = np.random.default_rng(seed)
    before_E, load_ME = np.repeat(np.arange(R), per_rank), rng.integers(0, 60, (micro_batches, R * per_rank))
    home_E = before_E.tolist()
    for _ in range(SWEEPS):
        last = home_E
        for i, j in combinations(range(len(home_E)), 2):
            tried = home_E.copy()
            tried[i], tried[j] = home_E[j], home_E[i]
            cost, now = (cost_on_a_node(load_ME, homes, before_E, R, move) for homes in (tried, home_E))
            home_E = tried if cost < now else home_E
        if home_E == last:
            break
    assert swap_ranks(load_ME, before_E, R, SwapPrices(move_inside=move)).tolist() == home_E


def test_micro_batches_count_not_their_sum():
    load_ME = np.array([[9, 1, 1, 9], [1, 9, 9, 1]])  # totals are even wherever experts are
    home_E = swap_ranks(load_ME, np.array([0, 1, 1, 0]), 2, SwapPrices())
    assert home_E[0] != home_E[3]
    assert home_E[1] != home_E[2]


def test_bins_are_numbered_so_that_most_experts_stay():
    before_E = np.array([2, 2, 0, 0, 1, -1])
    assert renumber_bins(np.array([0, 0, 1, 1, 2, 2]), before_E, 3).tolist() == [2, 2, 0, 0, 1, 1]
    assert renumber_bins(np.array([0, 1, 2, 0, 1, 2]), np.array([1, 2, 0, 1, 2, 0]), 3).tolist() == [1, 2, 0, 1, 2, 0]
