import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.baselines.eplb import eplb_placement
from relibra.planning.baselines.lplb import topology
from relibra.planning.registry import BALANCERS
from tests.planning.balancers.requests import ask, spread, step_skew

# Input and output of the example in DeepSeek's README: 12 experts in 4 groups, 16 slots, 2 nodes of 4 GPUs.
WEIGHT = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
EXPECTED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_placement_of_the_published_example():
    assert [eplb_placement(weight_E, 16, 4, 2, 8)[0].tolist() for weight_E in WEIGHT] == EXPECTED


def test_copies_are_numbered():
    expert_P, copy_P = eplb_placement(WEIGHT[0], 16, 4, 2, 8)
    for expert in range(12):
        assert sorted(copy_P[expert_P == expert].tolist()) == list(range((expert_P == expert).sum()))


def test_one_item_per_pack_is_the_identity():
    assert eplb_placement(np.array([1, 9, 5, 7]), 4, 1, 1, 4)[0].tolist() == [0, 1, 2, 3]


def _global_reference(weight_E, num_replicas, num_ranks):
    """Global EPLB in plain Python, with exact fractions."""
    from fractions import Fraction

    weights, counts = [int(w) for w in weight_E], [1] * len(weight_E)
    slots = list(range(len(weights)))
    while len(slots) < num_replicas:
        e = max(range(len(weights)), key=lambda e: (Fraction(weights[e], counts[e]), -e))
        slots.append(e)
        counts[e] += 1
    room, packs = num_replicas // num_ranks, [[] for _ in range(num_ranks)]
    if room == 1:
        return slots
    for e in sorted(slots, key=lambda e: -Fraction(weights[e], counts[e])):
        open_packs = [pack for pack in packs if len(pack) < room]
        min(open_packs, key=lambda pack: sum(Fraction(weights[f], counts[f]) for f in pack)).append(e)
    return [e for pack in packs for e in pack]


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_placement_equals_the_reference(seed, num_ranks, per_rank, slots):
    # copies in powers of two and small weights: float32, in which EPLB counts, is exact then
    rng = np.random.default_rng(seed)
    E = num_ranks * per_rank
    weight_E = 2**20 + rng.permutation(E) * 64
    num_replicas = min(E + num_ranks * slots, 2 * E)
    if num_replicas % num_ranks == 0:
        expected = _global_reference(weight_E, num_replicas, num_ranks)
        assert eplb_placement(weight_E, num_replicas, 1, 1, num_ranks)[0].tolist() == expected


def test_a_better_split_of_the_same_placement_never_loses():
    rng = np.random.default_rng(1)
    load_MLE = rng.multinomial(50_000, rng.dirichlet(np.full(64, 0.5)), (2, 2))
    request = ask(spread(load_MLE, 16), 2, slots=1)
    even, optimal = (step_skew(request, BALANCERS[name].decide(request)) for name in ("eplb", "eplb_lp"))
    assert 1 <= optimal < even


@pytest.mark.parametrize(("num_ranks", "slots"), [(1, 2), (5, 1), (7, 2), (8, 2), (12, 2), (16, 2), (32, 2), (64, 3)])
def test_every_edge_set_of_lplb_is_a_permutation(num_ranks, slots):
    for origin_R in topology(num_ranks, slots):
        assert sorted(origin_R.tolist()) == list(range(num_ranks))


@pytest.mark.parametrize(("num_ranks", "accepted"), [(8, 1.02), (16, 1.03), (32, 1.01), (64, 1.10)])
def test_lplb_is_as_even_as_its_own_tests_ask(num_ranks, accepted):
    rng = np.random.default_rng(0)
    load_MLE = np.maximum(0, 10_000 * rng.normal(1, 0.3, (1, 4, 256))).astype(np.int64)
    request = ask(spread(load_MLE, num_ranks), max(1, num_ranks // 8), slots=2)
    assert step_skew(request, BALANCERS["lplb"].decide(request)) <= accepted
