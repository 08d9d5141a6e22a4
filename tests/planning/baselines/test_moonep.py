"""MoonEP's kernel against plain Python, and what its plans promise."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.baselines.moonep import solve
from relibra.planning.registry import BALANCERS
from tests.planning.balancers.requests import ask, rank_loads, spread


def _alloc_reference(load_E, home_E, num_ranks):
    """Return the token-slots of each expert on each rank, [E, R], one decision after the other."""
    load_R = np.bincount(home_E, weights=load_E, minlength=num_ranks).astype(int)
    capacity = -(-load_R.sum() // num_ranks)
    moved_RR = np.zeros((num_ranks, num_ranks), int)
    while load_R.max() > capacity:
        giver, receiver = load_R.argmax(), load_R.argmin()
        moved_RR[giver, receiver] = capacity - load_R[receiver]
        load_R[giver] -= moved_RR[giver, receiver]
        load_R[receiver] = capacity
    alloc_ER = np.zeros((len(load_E), num_ranks), int)
    alloc_ER[np.arange(len(load_E)), home_E] = load_E
    for giver in range(num_ranks):
        experts = np.flatnonzero(home_E == giver)
        left, quota_R = load_E[experts].copy(), moved_RR[giver].copy()
        while quota_R.max() > 0:
            e, receiver = left.argmax(), quota_R.argmax()
            amount = min(left[e], quota_R[receiver])
            alloc_ER[experts[e], receiver] += amount
            alloc_ER[experts[e], giver] -= amount
            left[e] -= amount
            quota_R[receiver] -= amount
    return alloc_ER


@st.composite
def _domains(draw):
    """Loads [M, E] and homes [E]: even, skewed, with ties and without any load."""
    num_ranks, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    home_E = rng.permutation(np.repeat(np.arange(num_ranks), per_rank))
    largest = draw(st.sampled_from([1, 4, 1000]))
    load_ME = rng.integers(0, largest, (3, len(home_E))) * rng.integers(1, draw(st.sampled_from([2, 30])), len(home_E))
    return load_ME, home_E, num_ranks


@given(_domains())
def test_plans_equal_the_reference(domain):
    load_ME, home_E, num_ranks = domain
    for load_E, replica_RB, quota_RB in zip(load_ME, *solve(load_ME, home_E, num_ranks), strict=True):
        alloc_ER = np.zeros((len(home_E), num_ranks), int)
        for r, b in np.argwhere(replica_RB >= 0):
            alloc_ER[replica_RB[r, b], r] += quota_RB[r, b]
        alloc_ER[np.arange(len(home_E)), home_E] += load_E - alloc_ER.sum(axis=1)
        assert np.array_equal(alloc_ER, _alloc_reference(load_E, home_E, num_ranks))


@given(_domains())
def test_no_rank_is_above_the_mean_or_has_two_givers(domain):
    load_ME, home_E, num_ranks = domain
    previous_map = np.argsort(home_E, kind="stable")[None].astype(np.int16)
    request = ask(spread(load_ME[:, None], num_ranks), 1, slots=1, previous_map=previous_map)
    placement = BALANCERS["moonep"].decide(request)
    load_MLR = rank_loads(request, placement)
    assert (load_MLR.max(axis=2) <= -(-load_MLR.sum(axis=2) // num_ranks)).all()
    for replica_RB in placement.replica_MLRB.reshape(-1, num_ranks, placement.slots):
        for held_B in replica_RB:
            assert len({home_E[e] for e in held_B if e >= 0}) <= 1


def test_a_domain_of_one_node_keeps_experts_on_their_node():
    load_MLE = np.random.default_rng(1).integers(0, 400, (3, 2, 16))
    request = ask(spread(load_MLE, 8), 2, slots=1)
    inside, anywhere = (BALANCERS[name].decide(request) for name in ("moonep_node", "moonep"))
    assert (inside.scope, inside.num_cross_node_copies) == ("node", 0)
    assert anywhere.scope == "cluster"
    assert anywhere.num_cross_node_copies > 0
    load_MLR = rank_loads(request, inside)
    for node in (slice(0, 4), slice(4, 8)):
        assert (load_MLR[..., node].max(axis=2) <= -(-load_MLR[..., node].sum(axis=2) // 4)).all()
