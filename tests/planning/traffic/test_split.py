"""The token split: both margins exact, local first, and equal to the plain reference."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.traffic.split import split_tokens, traffic_MLRR


@st.composite
def one_expert(draw):
    """Supply per source rank, instances on different ranks, and quotas that sum to the supply."""
    nodes, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    R = nodes * ranks
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    supply_R = rng.integers(0, draw(st.sampled_from([1, 3, 50, 30_000])) + 1, R)
    instances = rng.permutation(R)[: draw(st.integers(1, R))]
    quota_I = rng.multinomial(supply_R.sum(), rng.dirichlet(np.ones(len(instances)) * 0.5))
    return supply_R, instances, quota_I, ranks


def split_tokens_reference(supply_R, rank_I, quota_I, ranks_per_node):
    """Split one expert the slow and obvious way: Python integers and fractions, one stage after the other."""
    supply, left = [int(x) for x in supply_R], [int(x) for x in quota_I]
    out = np.zeros((len(supply), len(left)), dtype=np.int64)

    def serve(source, amount, instances):
        room = sum(left[i] for i in instances)
        exact = {i: Fraction(amount * left[i], room) for i in instances} if room else {}
        shares = {i: int(share) for i, share in exact.items()}
        by_remainder = sorted(exact, key=lambda i: (shares[i] - exact[i], i))
        for i in by_remainder[: amount - sum(shares.values())]:
            shares[i] += 1
        for i, share in shares.items():
            out[source, i] += share
            left[i] -= share
        supply[source] -= amount

    for i, rank in enumerate(rank_I):
        serve(int(rank), min(supply[rank], left[i]), [i])
    for start in range(0, len(supply), ranks_per_node):
        here = [i for i, rank in enumerate(rank_I) if start <= rank < start + ranks_per_node]
        sources = range(start, start + ranks_per_node)
        for source in sources:
            wanted, room = sum(supply[s] for s in sources if s >= source), sum(left[i] for i in here)
            serve(source, supply[source] if wanted <= room else supply[source] * room // wanted, here)
    for source in range(len(supply)):
        serve(source, supply[source], list(range(len(left))))
    return out


@given(one_expert())
def test_margins_are_exact_and_equal_the_reference(case):
    supply_R, rank_I, quota_I, ranks_per_node = case
    R = len(supply_R)
    replica_RB, quota_RB = np.full((R, 1), -1), np.zeros((R, 1), dtype=int)
    replica_RB[rank_I[1:], 0], quota_RB[rank_I[1:], 0] = 0, quota_I[1:]
    split = split_tokens(supply_R[:, None], rank_I[:1], replica_RB, quota_RB, ranks_per_node)
    order = np.argsort(np.where(np.arange(len(rank_I)) == 0, -1, rank_I))
    assert split.rank_I.tolist() == rank_I[order].tolist()
    assert (split.tokens_RI.sum(axis=0) == quota_I[order]).all()
    assert (split.tokens_RI.sum(axis=1) == supply_R).all()
    assert (split.tokens_RI >= 0).all()
    expected = split_tokens_reference(supply_R, rank_I[order], quota_I[order], ranks_per_node)
    assert (split.tokens_RI == expected).all()
    local = np.minimum(supply_R[split.rank_I], quota_I[order])
    assert (split.tokens_RI[split.rank_I, np.arange(len(rank_I))] >= local).all()


def test_traffic_counts_what_the_split_says():
    rng = np.random.default_rng(0)
    M, L, R, E, B = 2, 3, 6, 12, 2
    tokens = rng.integers(0, 40, (M, L, R, E)).astype(np.int32)
    home = np.stack([np.repeat(np.arange(R), 2)[rng.permutation(E)] for _ in range(L)])
    replica = np.full((M, L, R, B), -1, dtype=np.int16)
    quota = np.zeros((M, L, R, B), dtype=np.int32)
    for m in range(M):
        for layer in range(L):
            for r in range(R):
                e = int(rng.integers(E))
                if home[layer, e] != r:
                    replica[m, layer, r, 0] = e
                    quota[m, layer, r, 0] = tokens[m, layer, :, e].sum() // R
    traffic = traffic_MLRR(tokens, home, replica, quota, 3)
    for m in range(M):
        for layer in range(L):
            split = split_tokens(tokens[m, layer], home[layer], replica[m, layer], quota[m, layer], 3)
            expected = np.zeros((R, R), dtype=int)
            for i, rank in enumerate(split.rank_I):
                expected[:, rank] += split.tokens_RI[:, i]
            assert (traffic[m, layer] == expected).all()


def test_too_large_promises_are_noticed():
    with pytest.raises(AssertionError, match="exceed the load"):
        split_tokens(np.array([[3], [0]]), np.array([0]), np.array([[-1], [0]]), np.array([[0], [4]]), 2)
