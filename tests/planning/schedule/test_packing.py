"""Packing and locality: limits hold, nothing gets lost, and the cost falls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.planning.schedule.locality import LENGTH_BUCKET, place_samples
from relibra.planning.schedule.packing import PackingLimits, pack_samples


def packing_cost(share_SLN, micro_batch_S):
    """Return the sum over micro-batches and layers of the load of the fullest node."""
    kept = micro_batch_S >= 0
    load_MLN = np.zeros((int(micro_batch_S.max(initial=-1)) + 1, *share_SLN.shape[1:]))
    np.add.at(load_MLN, micro_batch_S[kept], share_SLN[kept])
    return float(load_MLN.max(axis=2).sum())


@st.composite
def schedules(draw):
    S, L, N, M = draw(st.integers(1, 24)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share_SLN = rng.integers(0, 100, (S, L, N)).astype(np.float32)
    length_S = rng.integers(1, draw(st.sampled_from([1, 10, 500])) + 1, S)
    micro_batch_S = rng.integers(-1, M, S).astype(np.int32)
    rank_S = rng.integers(0, 2 * N, S).astype(np.int32)
    return share_SLN, micro_batch_S, rank_S, length_S, 2 * N


@given(schedules(), st.sampled_from([0.0, 0.1, 1.0]))
def test_packing_keeps_limits_and_samples(schedule, slack):
    share_SLN, micro_batch_S, rank_S, length_S, num_ranks = schedule
    limits = PackingLimits.of_schedule(micro_batch_S, length_S, token_slack=slack, attention_slack=slack)
    open_M = np.arange(micro_batch_S.max(initial=-1) + 1) != 1
    packed_S, new_rank_S = pack_samples(
        share_SLN, micro_batch_S, rank_S, length_S, num_ranks, open_M, limits=limits, proposals=2000, seed=1
    )
    assert open_M[packed_S[packed_S != micro_batch_S]].all()
    assert ((packed_S < 0) == (micro_batch_S < 0)).all()
    assert packed_S.max(initial=-1) <= micro_batch_S.max(initial=-1)
    assert ((new_rank_S >= 0) & (new_rank_S < num_ranks)).all()
    kept = packed_S >= 0
    assert np.bincount(packed_S[kept], weights=length_S[kept]).max(initial=0) <= limits.tokens + 1e-6
    assert np.bincount(packed_S[kept], weights=length_S[kept] ** 2.0).max(initial=0) <= limits.attention + 1e-6
    assert packing_cost(share_SLN, packed_S) <= packing_cost(share_SLN, micro_batch_S) + 1e-3


def test_packing_mixes_what_complements_each_other():
    """Two kinds of samples, dealt pure: mixing them evens both micro-batches."""
    share_SLN = np.zeros((8, 1, 2), dtype=np.float32)
    share_SLN[:4, 0, 0] = share_SLN[4:, 0, 1] = 10
    micro_batch_S = np.repeat([0, 1], 4).astype(np.int32)
    length_S = np.full(8, 10)
    limits = PackingLimits.of_schedule(micro_batch_S, length_S, token_slack=0.0, attention_slack=0.0)
    packed_S, rank_S = pack_samples(
        share_SLN,
        micro_batch_S,
        np.tile(np.arange(4), 2),
        length_S,
        4,
        np.ones(2, dtype=bool),
        limits=limits,
        proposals=2000,
        seed=0,
    )
    assert packing_cost(share_SLN, micro_batch_S) == 80
    assert packing_cost(share_SLN, packed_S) == 40
    assert [sorted(rank_S[packed_S == m].tolist()) for m in (0, 1)] == [[0, 1, 2, 3]] * 2


@given(schedules())
def test_locality_deals_the_same_ranks_anew(schedule):
    share_SLN, micro_batch_S, rank_S, length_S, _ = schedule
    placed_S = place_samples(share_SLN, micro_batch_S, rank_S, length_S, 2)
    gain_SN = share_SLN.sum(axis=1)
    kept = np.flatnonzero(micro_batch_S >= 0)
    assert gain_SN[kept, placed_S[kept] // 2].sum() >= gain_SN[kept, rank_S[kept] // 2].sum() - 1e-3
    for m in range(micro_batch_S.max(initial=-1) + 1):
        members = micro_batch_S == m
        assert sorted(placed_S[members].tolist()) == sorted(rank_S[members].tolist())
        for rank in range(6):
            before, after = length_S[members & (rank_S == rank)], length_S[members & (placed_S == rank)]
            assert after.sum() <= LENGTH_BUCKET * before.sum() + 1e-9


def test_locality_feeds_samples_where_their_experts_live():
    share_SLN = np.zeros((4, 1, 2), dtype=np.float32)
    share_SLN[[0, 1], 0, 1] = share_SLN[[2, 3], 0, 0] = 10
    placed_S = place_samples(share_SLN, np.zeros(4, dtype=np.int32), np.arange(4), np.full(4, 7), 2)
    assert (placed_S // 2).tolist() == [1, 1, 0, 0]


def test_limits_come_from_the_largest_micro_batch():
    limits = PackingLimits.of_schedule(
        np.array([0, 0, 1, -1]), np.array([10, 20, 25, 99]), token_slack=0.1, attention_slack=0.0
    )
    assert (limits.tokens, limits.attention) == pytest.approx((33.0, 625.0))
