"""Replicas for traffic, against a slow walk over (domain, expert) pairs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.levers.traffic_replicas import hottest_remote_experts


def choose_slowly(source_XE, home_E, ranks_per_domain, slots):
    """Walk over pairs by falling token-slots; each goes to the least loaded rank of its domain with room."""
    X, E = source_XE.shape
    load_R = [0] * (X * ranks_per_domain)
    for e in range(E):
        load_R[home_E[e]] += int(source_XE[:, e].sum())
    held = {r: [] for r in range(len(load_R))}
    for minus, domain, e in sorted((-int(source_XE[x, e]), x, e) for x in range(X) for e in range(E)):
        ranks = range(domain * ranks_per_domain, (domain + 1) * ranks_per_domain)
        free = [r for r in ranks if len(held[r]) < slots]
        if minus and home_E[e] not in ranks and free:
            rank = min(free, key=lambda r: load_R[r])
            held[rank].append(e)
            load_R[rank] -= minus
            load_R[home_E[e]] += minus
    return [held[r] + [-1] * (slots - len(held[r])) for r in held]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 1 << 20))
def test_the_hottest_remote_experts_are_those_of_a_slow_walk(domains, ranks, per_rank, slots, seed):
    rng = np.random.default_rng(seed)
    R = domains * ranks
    source_XE = rng.integers(0, rng.choice([2, 50]), (domains, R * per_rank))
    home_E = rng.permutation(np.repeat(np.arange(R), per_rank))
    held_RB = hottest_remote_experts(source_XE, home_E, ranks, slots)
    assert held_RB.tolist() == choose_slowly(source_XE, home_E, ranks, slots)
    for r, held_B in enumerate(held_RB):
        held = held_B[held_B >= 0]
        assert (home_E[held] // ranks != r // ranks).all()
        assert len(set(held.tolist())) == len(held)
