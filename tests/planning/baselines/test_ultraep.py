"""UltraEP: its published table, and its kernels against plain Python; recorded routes are in test_peers_recorded.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.baselines.ultraep import shed_excess, solve, sort_sources
from tests.planning.splits import rank_load


def _ultraep_load(rng, num_experts, num_ranks, tokens, target):
    """UltraEP's load generator: weight 1 / (rank + 1)^a / (local + 1)^4, `a` such that ranks have the target skew.

    A token takes 8 different experts; with exponential clocks of these rates, expert e is among the first 8 with
    probability 1 - exp(-c weight), `c` such that these sum to 8.
    """
    rank_E, local_E = np.divmod(np.arange(num_experts), num_experts // num_ranks)

    def bisect(value, low, high, wanted):
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if value(middle) < wanted else (low, middle)
        return low

    def inclusion(a):
        weight_E = (rank_E + 1.0) ** -a * (local_E + 1.0) ** -4
        c = bisect(lambda c: -np.expm1(-np.exp(c) * weight_E).sum(), -10, 60, 8)
        return -np.expm1(-np.exp(c) * weight_E)

    def skew(a):
        load_R = inclusion(a).reshape(num_ranks, -1).sum(axis=1)
        return load_R.max() / load_R.mean()

    return rng.binomial(tokens, inclusion(bisect(skew, 0, 20, target)))


@pytest.mark.parametrize(
    ("num_experts", "slots", "start", "skew", "copies", "most"),
    [
        (256, 2, 1.5, 1.0101, (38, 46), (3, 5)),
        (256, 2, 2.0, 1.0101, (40, 54), (4, 6)),
        (256, 2, 3.0, 1.0101, (43, 59), (5, 7)),
        (128, 1, 6.0, 1.0705, (35, 50), (6, 10)),
        (128, 1, 8.0, 1.0905, (35, 50), (7, 11)),
    ],
)
def test_skew_and_copies_are_those_published(num_experts, slots, start, skew, copies, most):
    home_E = np.repeat(np.arange(64), num_experts // 64)
    for seed in range(3):
        load_E = _ultraep_load(np.random.default_rng(seed), num_experts, 64, 8192 * 64, start)
        replica_RB, quota_RB = (array[0] for array in solve(load_E[None], home_E, 64, slots))
        load_R = rank_load(load_E, home_E, replica_RB, quota_RB)
        assert np.bincount(home_E, weights=load_E).max() / load_E.sum() * 64 == pytest.approx(start, rel=0.02)
        assert load_R.max() / load_R.mean() <= skew
        assert copies[0] <= (replica_RB >= 0).sum() <= copies[1]
        assert most[0] <= np.bincount(replica_RB[replica_RB >= 0]).max() <= most[1]


def _oracle_reference(load_E, home_E, num_ranks, slots, tau, floor):
    """The oracle as a list of (expert, target, tokens), in plain Python; None if it fails."""
    load, placed = [int(load_E[home_E == r].sum()) for r in range(num_ranks)], []
    slack, free = [max(tau - x, 0) for x in load], [slots] * num_ranks
    if sum(max(x - tau, 0) for x in load) > sum(slack):
        return None
    for r in sorted(range(num_ranks), key=lambda r: (-load[r], r)):
        need = max(load[r] - tau, 0)
        for e in sorted(np.flatnonzero(home_E == r).tolist(), key=lambda e: (-load_E[e], e)):
            available = int(load_E[e]) - 1
            while need > 0 and available > 0:
                hosts = {t for f, t, _ in placed if f == e}
                targets = [t for t in range(num_ranks) if slack[t] > 0 and free[t] and t not in hosts]
                fits = [t for t in targets if min(need, slack[t], available) >= (floor or -(-need // len(targets)))]
                if not fits:
                    break
                t = max(fits, key=lambda t: (slack[t], -t))
                x = min(need, slack[t], available)
                placed.append((e, t, x))
                slack[t], free[t], need, available = slack[t] - x, free[t] - 1, need - x, available - x
        if need > 0:
            return None
    return placed


def _oracle(load_E, home_E, num_ranks, slots, tau, floor):
    """Return replicas and quotas with at most `tau` token-slots per rank, or None if the greedy way finds none."""
    load_R = np.bincount(home_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    replica_RB, quota_RB = np.empty((num_ranks, slots), np.int16), np.empty((num_ranks, slots), np.int32)
    room_R, free_R = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    sources = sort_sources(load_E, home_E, load_R)
    found = shed_excess(load_E, load_R, *sources, tau, floor, room_R, free_R, replica_RB, quota_RB)
    return (replica_RB, quota_RB) if found else None


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(1, 1.6),
    st.sampled_from([0, 1, 30, 1024]),
)
def test_oracle_equals_its_reference(seed, num_ranks, per_rank, slots, above, floor):
    rng = np.random.default_rng(seed)
    home_E = rng.permutation(np.repeat(np.arange(num_ranks), per_rank))
    load_E = rng.integers(0, 200, num_ranks * per_rank) * rng.integers(1, 4, num_ranks * per_rank)
    tau = int(above * load_E.sum() / num_ranks) + 1
    found = _oracle(load_E, home_E, num_ranks, slots, tau, floor)
    placed = _oracle_reference(load_E, home_E, num_ranks, slots, tau, floor)
    assert (found is None) == (placed is None)
    if found is not None:
        replica_RB, quota_RB = found
        got = {(int(replica_RB[r, b]), r, int(quota_RB[r, b])) for r, b in np.argwhere(replica_RB >= 0)}
        assert got == set(placed)


def _solve_reference(load_E, home_E, num_ranks, slots, u_min):
    """UltraEP's choice of a ceiling, in plain Python: three near the mean, then a search with four probes each."""

    def oracle(tau, floor):
        return _oracle_reference(load_E, home_E, num_ranks, slots, tau, floor)

    mean = -(-int(load_E.sum()) // num_ranks)
    top = max(mean, *(int(load_E[home_E == r].sum()) for r in range(num_ranks)))
    tau = -(-mean * 101 // 100)
    for _ in range(3):
        if (placed := oracle(tau, 0)) is not None:
            return placed
        tau = min(top, tau + max(1, -(-top // 100)))
    if (placed := oracle(mean, u_min)) is not None:
        return placed
    low, high = min(mean + 1, top), top
    while low < high:
        if high - low <= 4:
            return oracle(next((t for t in range(low, high) if oracle(t, u_min) is not None), high), u_min)
        probes = [low + (high - low) * w // 5 for w in (1, 2, 3, 4)]
        good = next((w for w in range(4) if oracle(probes[w], u_min) is not None), 4)
        low, high = probes[good - 1] + 1 if good else low, probes[good] if good < 4 else high
    return oracle(low, u_min)


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 30, 1024])
)
def test_plans_equal_the_reference(seed, num_ranks, per_rank, slots, u_min):
    rng = np.random.default_rng(seed)
    home_E = rng.permutation(np.repeat(np.arange(num_ranks), per_rank))
    load_E = rng.integers(0, 200, len(home_E)) * rng.integers(0, 9, len(home_E)) ** rng.integers(1, 3)
    replica_RB, quota_RB = (array[0] for array in solve(load_E[None], home_E, num_ranks, slots, u_min=u_min))
    got = {(int(replica_RB[r, b]), int(r), int(quota_RB[r, b])) for r, b in np.argwhere(replica_RB >= 0)}
    assert got == set(_solve_reference(load_E, home_E, num_ranks, slots, u_min))
