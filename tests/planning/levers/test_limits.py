"""Limits of a schedule: stated, or those of the fullest rank."""

from dataclasses import replace

import numpy as np
import pytest

from relibra import Demand
from relibra.planning.levers.limits import ScheduleLimits


def demand():
    """Micro-batch 0: 10 and 20 tokens on rank 0, 40 on rank 1; micro-batch 1: 25 on rank 1; one sample is out."""
    counts_SLE = np.zeros((5, 2, 4), dtype=np.int32)
    counts_SLE[:, :, 0] = 2 * np.array([[10], [20], [40], [25], [99]])
    made = Demand(counts_SLE=counts_SLE, layer_ids=np.arange(2), sample_ids=np.arange(5), top_k=2)
    return made.with_schedule(np.array([0, 0, 0, 1, -1]), np.array([0, 0, 1, 1, 0]), 2)


def test_limits_are_those_of_the_fullest_rank():
    limits = ScheduleLimits.of_demand(demand(), rank_tokens=None)
    assert (limits.rank_tokens, limits.rank_attention) == (40, 1600)
    assert limits.micro_batch_tokens == pytest.approx(70 * 1.02)


def test_a_sample_beyond_the_limit_raises_no_other_limit():
    limits = ScheduleLimits.of_demand(demand(), rank_tokens=32)
    assert (limits.rank_tokens, limits.rank_attention) == (32, 625)


def test_without_choices_per_token_limits_are_in_token_slots():
    limits = ScheduleLimits.of_demand(replace(demand(), top_k=None), rank_tokens=None)
    assert (limits.rank_tokens, limits.micro_batch_tokens) == (80, pytest.approx(140 * 1.02))


def test_a_demand_without_samples_has_limits_of_0():
    nothing = demand().with_schedule(np.full(5, -1), np.zeros(5, dtype=int), 2, 0)
    assert ScheduleLimits.of_demand(nothing, rank_tokens=None).rank_tokens == 0
