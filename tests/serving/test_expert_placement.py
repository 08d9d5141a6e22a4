"""Copies of experts on workers, and which copy computes a row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import ConfigError, EngineError
from relibra.serving.layout import add_copies, place_experts, place_table, split_experts, worker_imbalance


@given(
    experts=st.integers(4, 40),
    workers=st.integers(2, 6),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_every_expert_stays_and_copies_are_on_other_workers(experts, workers, spare, seed):
    workers = min(workers, experts)
    base = split_experts(experts, workers)
    load_E = np.random.default_rng(seed).zipf(1.5, experts).astype(float)
    placed = add_copies(base, load_E, spare)
    for own, before in zip(placed, base, strict=True):
        assert set(before) <= set(own)
        assert list(own) == sorted(set(own))
        assert len(own) <= len(before) + spare
    assert worker_imbalance(placed, np.ones(experts)) >= 1.0


def test_copies_of_hot_experts_even_out_the_workers():
    load_E = 1.0 / np.arange(1, 33)
    base = split_experts(32, 8)
    one, two = (worker_imbalance(add_copies(base, load_E, spare), load_E) for spare in (1, 2))
    assert worker_imbalance(base, load_E) > 4
    assert two <= one < 2.2
    assert two < 1.4


@given(
    expert_Y=st.lists(st.integers(0, 4), max_size=60),
    lost=st.sampled_from([(), (0,), (2,)]),
)
def test_rows_are_shared_evenly_by_the_copies_that_are_left(expert_Y, lost):
    placement = ((0, 1, 2), (1, 3, 4), (0, 2, 3, 4))
    table = place_table(placement, lost)
    flat = [(worker, expert) for worker, own in enumerate(placement) for expert in own]
    rows = np.asarray(expert_Y, dtype=np.int64)
    places = table.place_rows(rows)
    assert [flat[place][1] for place in places] == expert_Y
    assert not {flat[place][0] for place in places} & set(lost)
    for expert in range(5):
        copies = [place for place, (worker, one) in enumerate(flat) if one == expert and worker not in lost]
        taken = [int((places == place).sum()) for place in copies]
        assert max(taken) - min(taken) <= 1


def test_an_expert_without_a_copy_is_named():
    with pytest.raises(EngineError, match=r"expert workers \[1\] are lost.*1 experts.*the first is 2"):
        place_table(((0, 1), (1, 2)), {1})


@pytest.mark.parametrize(("workers", "spare"), [(1, 1), (2, 3)])
def test_copies_on_one_worker_are_refused(workers, spare):
    with pytest.raises(ConfigError, match=f"--spare-experts {spare}"):
        place_experts(4, workers, spare)
