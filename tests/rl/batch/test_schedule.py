"""The schedule: everything once, whole units, the token limit, and mini-batches that do not know the ranks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.rl.batch.schedule import make_schedule, own_micro_batches
from tests.rl.made_up import mini_batch_of, of_rank

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@st.composite
def steps(draw):
    """(tokens, unit of each response, mini-batches, token limit, ranks)."""
    tokens_S = np.array(draw(LENGTHS), dtype=np.int64)
    group = draw(st.integers(1, 5))
    unit_S = np.random.default_rng(len(tokens_S)).permutation(len(tokens_S)) // group * 7
    return tokens_S, unit_S, draw(st.integers(1, 9)), draw(st.integers(1, 150)), draw(st.integers(1, 5))


def schedule_of(step, num_ranks=None):
    tokens_S, unit_S, mini_batches, limit, ranks = step
    return make_schedule(
        tokens_S, unit_S, mini_batches=mini_batches, micro_batch_tokens=limit, num_ranks=num_ranks or ranks
    )


@settings(max_examples=40)
@given(steps())
def test_every_response_is_trained_once_on_one_rank(step):
    schedule, ranks = schedule_of(step), step[4]
    trained = [s for rank in range(ranks) for micro_batch in of_rank(schedule, rank) for s in micro_batch.tolist()]
    assert sorted(trained) == list(range(len(step[0])))
    for rank in range(ranks):
        assert len(of_rank(schedule, rank)) == schedule.num_micro_batches, "every rank takes part in every micro-batch"


@settings(max_examples=40)
@given(steps())
def test_a_rank_gets_no_more_tokens_than_the_limit_unless_a_response_goes_alone(step):
    schedule, (tokens_S, _, _, limit, ranks) = schedule_of(step), step
    for rank in range(ranks):
        for chosen in of_rank(schedule, rank):
            assert len(chosen) <= 1 or tokens_S[chosen].sum() <= limit


@settings(max_examples=40)
@given(steps())
def test_mini_batches_are_whole_units_in_order_and_as_even_as_can_be(step):
    schedule, unit_S, mini_batches = schedule_of(step), step[1], step[2]
    assert (np.diff(schedule.mini_batch_M) >= 0).all()
    units = np.unique(unit_S)
    of_unit = [set(mini_batch_of(schedule)[unit_S == unit].tolist()) for unit in units]
    assert all(len(found) == 1 for found in of_unit), "a unit is torn apart"
    order = [found.pop() for found in of_unit]
    assert order == sorted(order)
    sizes = np.bincount(order)
    assert len(sizes) == min(mini_batches, len(units))
    assert sizes.max() - sizes.min() <= 1


@settings(max_examples=40)
@given(steps(), st.integers(1, 6))
def test_what_a_mini_batch_holds_does_not_depend_on_the_ranks(step, other_ranks):
    assert mini_batch_of(schedule_of(step)).tolist() == mini_batch_of(schedule_of(step, other_ranks)).tolist()


@settings(max_examples=40)
@given(steps())
def test_no_micro_batch_of_a_mini_batch_is_empty_on_all_ranks(step):
    schedule = schedule_of(step)
    assert set(schedule.micro_batch_S.tolist()) == set(range(schedule.num_micro_batches))


@settings(max_examples=40)
@given(steps())
def test_micro_batches_are_as_few_as_their_tokens_allow(step):
    """At most one more than tokens need wherever no response is longer than half of the limit."""
    schedule, (tokens_S, _, _, limit, ranks) = schedule_of(step), step
    for number in np.unique(schedule.mini_batch_M):
        own = tokens_S[mini_batch_of(schedule) == number]
        if own.max() * 2 > limit:
            continue
        needed = -(-own.sum() // (limit * ranks))
        assert (schedule.mini_batch_M == number).sum() <= 2 * needed


def test_the_longest_goes_first_to_the_emptiest_place():
    schedule = make_schedule(
        np.array([1, 9, 4, 5, 6, 3]), np.arange(6), mini_batches=1, micro_batch_tokens=14, num_ranks=2
    )
    # 9 | 6, then 5 to the 6 (11), 4 to the 9 (13), 3 to the 11 (14), 1 to the 13 (14)
    assert schedule.num_micro_batches == 1
    assert [chosen.tolist() for rank in range(2) for chosen in of_rank(schedule, rank)] == [[0, 1, 2], [3, 4, 5]]


def test_a_step_without_responses_has_no_micro_batch():
    none = np.zeros(0, dtype=np.int64)
    schedule = make_schedule(none, none, mini_batches=4, micro_batch_tokens=10, num_ranks=2)
    assert schedule.num_micro_batches == 0
    assert of_rank(schedule, 1) == []
    assert mini_batch_of(schedule).tolist() == []


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_runs_of_one_rank_keep_the_order_and_close_no_run_too_early(tokens, limit):
    runs = own_micro_batches(tokens, limit)
    assert [s for run in runs for s in run] == list(range(len(tokens)))
    for run in runs:
        assert len(run) == 1 or sum(tokens[s] for s in run) <= limit
    for run, following in pairwise(runs):
        assert sum(tokens[s] for s in [*run, following[0]]) > limit


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_same_lengths_give_the_same_schedule(num_ranks):
    tokens_S = np.random.default_rng(0).integers(1, 50, 33)
    schedules = [
        make_schedule(tokens_S, np.arange(33) // 3, mini_batches=4, micro_batch_tokens=100, num_ranks=num_ranks)
        for _ in range(2)
    ]
    assert schedules[0].micro_batch_S.tolist() == schedules[1].micro_batch_S.tolist()
    assert schedules[0].rank_S.tolist() == schedules[1].rank_S.tolist()
