"""Repacking of another trainer's schedule: what it chose stays, and ranks of experts get even loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.integrations.repacking import TrainerSchedule, attention_skew, lowest_skew, rank_skew, repack
from tests.planning.levers.schedules import draw_lengths


def one_step(micro_batch_S, rank_S, *, group_ranks):
    """Return the schedule of a step in which these are the micro-batches and ranks of the samples."""
    return TrainerSchedule(
        micro_batch_S=np.array(micro_batch_S, dtype=np.int32),
        rank_S=np.array(rank_S, dtype=np.int32),
        step_M=np.zeros(int(max(micro_batch_S)) + 1, dtype=np.int32),
        num_ranks=int(max(rank_S)) + 1,
        group_ranks=group_ranks,
    )


def draw_case(rng, *, samples=48, steps=2, micro_batches=3, groups=2, group_ranks=2, expert_ranks=4):
    """Draw a schedule whose every (micro-batch, rank) has a sample, and the loads of its samples.

    samples   beyond one of each micro-batch and rank
    """
    ranks, batches = groups * group_ranks, steps * micro_batches
    cells = rng.permutation(np.concatenate([np.arange(batches * ranks), rng.integers(batches * ranks, size=samples)]))
    length_S = draw_lengths(rng, len(cells), 100).astype(np.int64)
    weight_SLR = rng.dirichlet(np.full(expert_ranks, 0.3), size=(len(cells), 2))
    schedule = TrainerSchedule(
        micro_batch_S=(cells // ranks).astype(np.int32),
        rank_S=(cells % ranks).astype(np.int32),
        step_M=np.repeat(np.arange(steps), micro_batches).astype(np.int32),
        num_ranks=ranks,
        group_ranks=group_ranks,
    )
    return (weight_SLR * 2 * length_S[:, None, None]).astype(np.float32), length_S, schedule


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans(), st.booleans())
def test_what_the_trainer_chose_stays(seed, stated, keep_ranks, keep_counts):
    share_SLR, length_S, given_schedule = draw_case(np.random.default_rng(seed))
    limit = 150 if stated else None
    packed = repack(
        share_SLR, length_S, given_schedule, rank_tokens=limit, keep_ranks=keep_ranks, keep_counts=keep_counts
    )
    steps = [schedule.step_M[schedule.micro_batch_S] for schedule in (given_schedule, packed)]
    assert np.array_equal(*steps), "a sample left its optimizer step"
    assert np.array_equal(given_schedule.rank_S // 2, packed.rank_S // 2), (
        "a sample left the ranks it shares experts with"
    )
    ones = np.ones_like(length_S)
    count_MR, old_MR = packed.sum_per_rank(ones), given_schedule.sum_per_rank(ones)
    assert count_MR.min() >= 1, "a rank waits for nothing"
    if keep_ranks:
        assert np.array_equal(given_schedule.rank_S, packed.rank_S)
    if keep_counts:
        assert np.array_equal(count_MR, old_MR)
    tokens_MR, given_MR = packed.sum_per_rank(length_S), given_schedule.sum_per_rank(length_S)
    fullest = given_MR[old_MR > 1].max(initial=0) if stated else given_MR.max()
    assert tokens_MR[count_MR > 1].max(initial=0) <= max(limit or 0, fullest)
    assert lowest_skew(share_SLR, packed) == lowest_skew(share_SLR, given_schedule)
    assert lowest_skew(share_SLR, packed) - 1e-6 <= rank_skew(share_SLR, packed)
    assert rank_skew(share_SLR, packed) <= rank_skew(share_SLR, given_schedule) + 1e-6


def waited_for(share_SLR, attention_S, schedule):
    """Add up, micro-batch by micro-batch and group by group, the busiest rank of each layer and the longest attention.

    Obvious and slow; `repack` adds up its candidates for itself.
    """
    total = 0.0
    for m in range(len(schedule.step_M)):
        for first in range(0, schedule.num_ranks, schedule.group_ranks):
            ranks = range(first, first + schedule.group_ranks)
            members = [
                s for s in range(len(share_SLR)) if schedule.micro_batch_S[s] == m and schedule.rank_S[s] in ranks
            ]
            if members:
                total += sum(max(layer_R) for layer_R in share_SLR[members].sum(axis=0, dtype=np.float64))
            total += max(sum(attention_S[s] for s in members if schedule.rank_S[s] == rank) for rank in ranks)
    return total


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 30]), st.sampled_from([0.0, 0.05, 1.0]), st.booleans())
def test_a_free_choice_is_never_worse_than_kept_ranks(seed, samples, price, keep_counts):
    """Also with one sample for each micro-batch and rank, where swaps of neighbours in length gain little."""
    share_SLR, length_S, given_schedule = draw_case(
        np.random.default_rng(seed), samples=samples, steps=1, micro_batches=8, group_ranks=4
    )
    attention_S = price * length_S.astype(np.float64) ** 2
    schedules = [
        repack(
            share_SLR,
            length_S,
            given_schedule,
            attention_S=attention_S,
            keep_ranks=keep_ranks,
            keep_counts=keep_counts,
        )
        for keep_ranks in (False, True)
    ]
    free, kept, before = (waited_for(share_SLR, attention_S, one) for one in (*schedules, given_schedule))
    assert free <= kept * (1 + 1e-6)
    assert kept <= before * (1 + 1e-6)


def test_samples_of_other_lengths_are_exchanged_too():
    """Lengths tell tasks apart, as thousands of samples do: the trainer's micro-batches are pure, skew 2."""
    tasks, of_task = 4, 1000
    share_SLR = np.zeros((tasks * of_task, 1, 2), dtype=np.float32)
    length_S = np.repeat(100 + np.arange(tasks), of_task).astype(np.int64)
    for task in range(tasks):
        share_SLR[task * of_task : (task + 1) * of_task, 0, task % 2] = 100
    place_S = np.arange(tasks * of_task)
    pure = one_step(place_S // of_task, place_S % 4, group_ranks=4)
    assert rank_skew(share_SLR, pure) == 2.0
    assert rank_skew(share_SLR, repack(share_SLR, length_S, pure, keep_counts=True)) < 1.02


@pytest.mark.parametrize("keep_ranks", [False, True])
def test_samples_that_complement_each_other_meet(keep_ranks):
    """Samples of two tasks use one expert rank each; the trainer deals them pure: skew 2, then 1."""
    share_SLR = np.zeros((8, 1, 2), dtype=np.float32)
    share_SLR[:4, 0, 0] = share_SLR[4:, 0, 1] = 10
    pure = one_step(np.repeat([0, 1], 4), np.tile(np.arange(4), 2), group_ranks=4)
    length_S = np.full(8, 10, dtype=np.int64)
    assert rank_skew(share_SLR, pure) == 2.0
    packed = repack(share_SLR, length_S, pure, rank_tokens=10, keep_ranks=keep_ranks, keep_counts=True)
    assert rank_skew(share_SLR, packed) == 1.0


def test_a_long_attention_outweighs_even_loads():
    """The two long samples share a micro-batch, and would not if only loads of experts counted."""
    share_SLR = np.zeros((4, 1, 2), dtype=np.float32)
    share_SLR[:2, 0, 0] = share_SLR[2:, 0, 1] = 10
    pure = one_step([0, 0, 1, 1], [0, 1, 0, 1], group_ranks=2)
    length_S = np.array([12, 12, 11, 11], dtype=np.int64)
    assert rank_skew(share_SLR, repack(share_SLR, length_S, pure)) == 1.0
    prices_S = np.array([1000.0, 1000.0, 0.0, 0.0])
    assert rank_skew(share_SLR, repack(share_SLR, length_S, pure, attention_S=prices_S)) == 2.0


def test_attention_of_ranks_is_compared_inside_groups():
    """By hand: group 0 has (3, 1) and (2, 2), group 1 has (5, 5) and (0, 2) in its two micro-batches."""
    prices_S = np.array([3.0, 1, 2, 2, 5, 5, 0, 2])
    schedule = one_step([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3], group_ranks=2)
    assert attention_skew(prices_S, schedule) == pytest.approx((3 + 2 + 5 + 2) / (2 + 2 + 5 + 1))
