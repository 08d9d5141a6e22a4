"""Copies of experts on workers, in each layer, and what is lost with a worker."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import EngineError
from relibra.planning.deployment.expert_workers import place_by_number
from relibra.serving.layout import check_holders, experts_of, held_by, place_copies, worker_imbalance


def homes_of(experts, workers):
    return np.stack([place_by_number(experts, workers)] * 2)


@given(
    experts=st.integers(4, 40),
    workers=st.integers(2, 6),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_every_expert_stays_and_copies_are_on_other_workers(experts, workers, spare, seed):
    workers = min(workers, experts)
    spare = min(spare, experts - -(-experts // workers))
    homes = homes_of(experts, workers)
    load_LE = np.random.default_rng(seed).zipf(1.5, (2, experts))
    held = place_copies(homes, spare, load_LE)
    assert (held | ~homes).all()
    assert (held.sum(axis=2) <= homes.sum(axis=2) + spare).all()
    assert worker_imbalance(held, np.ones((2, experts))) >= 1.0
    assert np.array_equal(held_by(experts_of(held), experts), held)


def test_copies_follow_the_load_of_each_layer():
    load_LE = np.stack([1000 // np.arange(1, 33), 1000 // np.arange(32, 0, -1)])
    homes = homes_of(32, 8)
    one, two = (worker_imbalance(place_copies(homes, spare, load_LE), load_LE) for spare in (1, 2))
    same = np.stack([place_copies(homes[:1], 1, load_LE.sum(axis=0)[None])[0]] * 2)
    assert worker_imbalance(homes, load_LE) > 4
    assert two <= one < 2.2
    assert two < 1.4
    assert one < 0.9 * worker_imbalance(same, load_LE)


def test_an_expert_without_a_copy_is_named():
    held = held_by([[(0, 1), (0, 1, 2)], [(1, 2), (0, 1, 2)]], 3)
    check_holders(held, set())
    with pytest.raises(EngineError, match=r"expert workers \[1\] are lost.*1 experts.*the first is 2 of layer 0"):
        check_holders(held, {1})
