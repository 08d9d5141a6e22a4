from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.balancers.physical_placement import choose_homes_among_copies, count_copies, relabel_ranks
from relibra.planning.balancers.shares import even_quotas, local_first_quotas, optimal_quotas
from tests.planning.splits import lowest_busiest_rank, rank_load


@st.composite
def layouts(draw):
    """Loads [M, E], homes and replicas of one layer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    R, per_rank, B = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    E = R * per_rank
    home_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    replica_RB = np.full((R, B), -1, np.int16)
    for r in range(R):
        chosen = rng.permutation(np.flatnonzero(home_E != r))[: rng.integers(0, B + 1)]
        replica_RB[r, : len(chosen)] = chosen
    load_ME = rng.integers(0, draw(st.sampled_from([1, 10, 10_000])) + 1, (2, E))
    return load_ME, home_E, replica_RB


def _subset_bound(load_E, home_E, replica_RB):
    """MicroMoE (arXiv 2511.16947), equation 3: the densest set of ranks, counting experts that live nowhere else."""
    R, E = len(replica_RB), len(home_E)
    hosts = [{int(home_E[e])} | {r for r in range(R) if e in replica_RB[r]} for e in range(E)]
    return max(
        sum(load_E[e] for e in range(E) if hosts[e] <= set(ranks)) / size
        for size in range(1, R + 1)
        for ranks in combinations(range(R), size)
    )


@given(layouts())
def test_optimal_split_equals_linear_program_and_subset_formula(layout):
    load_ME, home_E, replica_RB = layout
    quota_MRB = optimal_quotas(load_ME, home_E, replica_RB)
    for load_E, quota_RB in zip(load_ME, quota_MRB, strict=True):
        top = rank_load(load_E, home_E, replica_RB, quota_RB, idle=True).max()
        lowest = lowest_busiest_rank(load_E, home_E, replica_RB)
        assert lowest == pytest.approx(_subset_bound(load_E, home_E, replica_RB), rel=1e-6, abs=1e-6)
        assert top == np.ceil(lowest - 1e-6)  # the best integers there are


def test_optimal_split_equals_linear_program_at_full_size():
    rng = np.random.default_rng(5)
    home_E = np.repeat(np.arange(64), 4)
    replica_RB = np.stack([rng.permutation(np.flatnonzero(home_E != r))[:2] for r in range(64)]).astype(np.int16)
    load_ME = rng.multinomial(500_000, rng.dirichlet(np.full(256, 0.5)), 3)
    quota_MRB = optimal_quotas(load_ME, home_E, replica_RB)
    for load_E, quota_RB in zip(load_ME, quota_MRB, strict=True):
        lowest = lowest_busiest_rank(load_E, home_E, replica_RB)
        assert rank_load(load_E, home_E, replica_RB, quota_RB, idle=True).max() == np.ceil(lowest - 1e-3)


@given(layouts(), st.integers(0, 2**32 - 1))
def test_even_split_follows_copies_to_less_than_one_token(layout, seed):
    load_ME, home_E, replica_RB = layout
    rng = np.random.default_rng(seed)
    copies_E, copies_RB = rng.integers(0, 3, len(home_E)), rng.integers(1, 3, replica_RB.shape)
    quota_MRB = even_quotas(load_ME, home_E, copies_E, replica_RB, copies_RB)
    for load_E, quota_RB in zip(load_ME, quota_MRB, strict=True):
        rank_load(load_E, home_E, replica_RB, quota_RB, idle=True)
        for e in range(len(home_E)):
            here = replica_RB == e
            if here.any():
                total = copies_E[e] + copies_RB[here].sum()
                assert (abs(quota_RB[here] - load_E[e] * copies_RB[here] / total) < 1).all()


@given(layouts(), st.integers(0, 2**32 - 1))
def test_local_first_equals_even_on_one_node_and_keeps_margins(layout, seed):
    load_ME, home_E, replica_RB = layout
    R, ones_E, ones_RB = len(replica_RB), np.ones(len(home_E), np.int64), np.ones(replica_RB.shape, np.int64)
    rng = np.random.default_rng(seed)
    tokens_MRE = np.stack([[rng.multinomial(load, [1 / R] * R) for load in load_E] for load_E in load_ME]).swapaxes(
        1, 2
    )
    one_node = local_first_quotas(tokens_MRE, home_E, ones_E, replica_RB, ones_RB, R)
    assert np.array_equal(one_node, even_quotas(load_ME, home_E, ones_E, replica_RB, ones_RB))
    nodes = local_first_quotas(tokens_MRE, home_E, ones_E, replica_RB, ones_RB, 1)
    for m, load_E in enumerate(load_ME):
        rank_load(load_E, home_E, replica_RB, nodes[m], idle=True)
        for r, b in np.argwhere(replica_RB >= 0):
            assert nodes[m, r, b] >= tokens_MRE[m, r, replica_RB[r, b]]  # its own tokens at least


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_homes_are_even_and_fit_the_slots(seed, R, per_rank, B):
    rng = np.random.default_rng(seed)
    E = R * per_rank
    placement_RP = rng.permutation(np.concatenate([np.arange(E), rng.integers(0, E, R * B)])).reshape(R, per_rank + B)
    before_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    home_E, copies_RE = choose_homes_among_copies(count_copies(placement_RP, E), before_E, rng.random(E), B)
    assert np.bincount(home_E, minlength=R).tolist() == [per_rank] * R
    assert copies_RE.sum() == R * (per_rank + B)
    assert (copies_RE.sum(axis=0) == np.bincount(placement_RP.ravel())).all()
    stays = count_copies(placement_RP, E)[before_E, np.arange(E)] > 0
    if stays.all():
        assert np.array_equal(home_E, before_E)


def test_two_copies_trade_places_on_an_overfull_rank():
    placement_RP = np.array([[0, 1, 2], [3, 4, 4], [5, 4, 5]])
    home_E, copies_RE = choose_homes_among_copies(
        count_copies(placement_RP, 6), np.repeat(np.arange(3), 2), np.arange(6.0), 1
    )
    assert np.bincount(home_E).tolist() == [2, 2, 2]
    guests_R = [int(((copies_RE[r] > 0) & (home_E != r)).sum()) for r in range(3)]
    assert max(guests_R) <= 1


def test_ranks_are_named_after_what_they_held():
    placement_RP = np.array([[4, 5, 0], [0, 1, 2], [2, 3, 4]])
    before_RQ = np.array([[0, 1], [2, 3], [4, 5]])
    assert relabel_ranks(placement_RP, before_RQ).tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 0]]
