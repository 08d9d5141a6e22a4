"""Samples that exchange ranks stay within the limits of a rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.planning.levers.limits import ScheduleLimits
from relibra.planning.relibra_paper.locality import place_samples
from tests.examples import few_and_many
from tests.planning.levers.schedules import assert_within_limits, bins_of, no_limits, scheduled_demands
from tests.planning.levers.test_packing import node_loads


@pytest.mark.parametrize(("attention", "exchanged"), [(221, True), (220, False)])
def test_a_rank_with_a_longer_single_sample_raises_no_limit(attention, exchanged):
    """Rank 0 attends for 400 alone; rank 1 would attend for 10^2 + 11^2 with the sample that wants to come."""
    length_S, rank_S = np.array([20, 10, 10, 11]), np.array([0, 1, 1, 2], dtype=np.int32)
    load_SLN = np.zeros((4, 1, 2), dtype=np.float32)
    load_SLN[[0, 1], 0, 0], load_SLN[2, 0, 1], load_SLN[3, 0, 0] = 1.0, 5.0, 5.0
    limits = ScheduleLimits(rank_tokens=30, rank_attention=attention, micro_batch_tokens=60.0)
    placed_S = place_samples(load_SLN, np.zeros(4, np.int32), rank_S, length_S, length_S**2, 4, 2, limits=limits)
    assert placed_S.tolist() == ([0, 1, 2, 1] if exchanged else [0, 1, 1, 2])


@few_and_many(200, 2000)
def test_locality_keeps_the_limits_of_every_rank(examples):
    @settings(max_examples=examples)
    @given(scheduled_demands(), st.booleans())
    def check(case, stated):
        demand, limit, per_node = case
        micro_batch_S, rank_S, length_S = demand.micro_batch_S, demand.rank_S, demand.length_S
        M, _, R, _ = demand.tokens_MLRE.shape
        limits = ScheduleLimits.of_demand(demand, rank_tokens=limit if stated else None)
        load_SLN = node_loads(demand, per_node)
        placed_S = place_samples(load_SLN, micro_batch_S, rank_S, length_S, length_S**2, R, per_node, limits=limits)
        before, after = (bins_of(micro_batch_S, ranks, length_S) for ranks in (rank_S, placed_S))
        most = limit if stated else max((sum(lengths) for lengths in before.values()), default=0)
        assert_within_limits(after, most)
        gain_SN = load_SLN.sum(axis=1)
        kept = np.flatnonzero(micro_batch_S >= 0)
        assert gain_SN[kept, placed_S[kept] // per_node].sum() >= gain_SN[kept, rank_S[kept] // per_node].sum() - 1e-3
        for m in range(M):
            members = micro_batch_S == m
            assert sorted(placed_S[members].tolist()) == sorted(rank_S[members].tolist())
            old, new = (
                [sum(n * n for n in lengths) for (batch, _), lengths in bins.items() if batch == m]
                for bins in (before, after)
            )
            assert max(new, default=0) <= max(old, default=0), "the micro-batch attends longer"

    check()


def test_attention_counts_what_shared_prompts_leave():
    """Samples that share a prompt attend for less than their squared length, and no rank gets beyond the limit."""
    rng, moved = np.random.default_rng(0), 0
    for _ in range(50):
        length_S, rank_S = rng.integers(20, 24, 24), np.repeat(np.arange(4, dtype=np.int32), 6)
        attention_S = (length_S**2 * rng.choice([1.0, 0.4], 24)).astype(np.int64)
        load_SLN = rng.random((24, 1, 2), dtype=np.float32)
        most = int(np.bincount(rank_S, attention_S).max())
        limits = ScheduleLimits(rank_tokens=1000, rank_attention=most, micro_batch_tokens=1e6)
        placed_S = place_samples(load_SLN, np.zeros(24, np.int32), rank_S, length_S, attention_S, 4, 2, limits=limits)
        assert np.bincount(placed_S, attention_S).max() <= most
        moved += int((placed_S != rank_S).sum())
    assert moved > 0


def test_locality_feeds_samples_where_their_experts_live():
    load_SLN = np.zeros((4, 1, 2), dtype=np.float32)
    load_SLN[[0, 1], 0, 1] = load_SLN[[2, 3], 0, 0] = 10
    length_S, micro_batch_S = np.full(4, 7), np.zeros(4, dtype=np.int32)
    placed_S = place_samples(load_SLN, micro_batch_S, np.arange(4), length_S, length_S**2, 4, 2, limits=no_limits())
    assert (placed_S // 2).tolist() == [1, 1, 0, 0]
