"""The schedule: everything once, whole units, the token limit, and mini-batches that do not know the ranks."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.rl.batch.schedule import cut_into_runs, make_schedule
from tests.planning.levers.schedules import assert_within_limits, bins_of, draw_lengths
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
@given(steps(), st.integers(1, 6))
def test_every_response_is_trained_once_on_one_rank(step, other_ranks):
    schedule, ranks = schedule_of(step), step[4]
    assert set(schedule.micro_batch_S.tolist()) == set(range(schedule.num_micro_batches)), "none is empty on all ranks"
    assert mini_batch_of(schedule).tolist() == mini_batch_of(schedule_of(step, other_ranks)).tolist()
    trained = [s for rank in range(ranks) for micro_batch in of_rank(schedule, rank) for s in micro_batch.tolist()]
    assert sorted(trained) == list(range(len(step[0])))
    for rank in range(ranks):
        assert len(of_rank(schedule, rank)) == schedule.num_micro_batches, "every rank takes part in every micro-batch"


@settings(max_examples=1000)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(1, 400), st.integers(1, 12), st.integers(1, 4))
def test_only_a_response_that_goes_alone_exceeds_the_token_limit(seed, responses, limit, ranks, mini_batches):
    tokens_S = draw_lengths(np.random.default_rng(seed), responses, limit)
    schedule = make_schedule(
        tokens_S, np.arange(responses), mini_batches=mini_batches, micro_batch_tokens=limit, num_ranks=ranks
    )
    assert_within_limits(bins_of(schedule.micro_batch_S, schedule.rank_S, tokens_S), limit)
    for number in np.unique(schedule.mini_batch_M):
        assert_long_responses_share_micro_batches(schedule, tokens_S, number, limit, ranks)


def assert_long_responses_share_micro_batches(schedule, tokens_S, number, limit, ranks):
    """The longest of a mini-batch come first, one on each rank; ranks beside them are full before others are used."""
    inside = np.flatnonzero(mini_batch_of(schedule) == number)
    first = int(np.flatnonzero(schedule.mini_batch_M == number)[0])
    long = sorted((int(n) for n in tokens_S[inside] if n > limit), reverse=True)
    micro_batches = -(-len(long) // ranks)
    for m in range(micro_batches):
        members = inside[schedule.micro_batch_S[inside] == first + m]
        found = sorted((int(n) for n in tokens_S[members] if n > limit), reverse=True)
        assert found == long[m * ranks : (m + 1) * ranks]
    for m in range(first + micro_batches, int(schedule.micro_batch_S[inside].max()) + 1):
        assert (tokens_S[schedule.micro_batch_S == m] <= limit).all()


def test_ranks_beside_a_long_response_are_filled_rest_is_even():
    """One of 20 makes three ranks wait: they take 8 tokens each in that time, and less is left for later."""
    tokens_S = np.array([20, *[4] * 15])
    schedule = make_schedule(tokens_S, np.arange(16), mini_batches=1, micro_batch_tokens=8, num_ranks=4)
    tokens = {
        where: sum(lengths) for where, lengths in bins_of(schedule.micro_batch_S, schedule.rank_S, tokens_S).items()
    }
    assert schedule.num_micro_batches == 3
    assert [tokens[0, r] for r in range(4)] == [20, 8, 8, 8]
    assert sorted(tokens[m, r] for m in (1, 2) for r in range(4) if (m, r) in tokens) == [4] * 7 + [8]


@settings(max_examples=40)
@given(steps())
def test_no_other_grouping_of_the_ranks_waits_less_for_attention(step):
    """Ranks of a micro-batch are neighbours in attention: each at least as long as all of the next micro-batch."""
    schedule, tokens_S = schedule_of(step), step[0]
    bins = bins_of(schedule.micro_batch_S, schedule.rank_S, tokens_S)
    for number in np.unique(schedule.mini_batch_M):
        of_micro_batch = [
            [sum(n * n for n in bins.get((int(m), r), [])) for r in range(step[4])]
            for m in np.flatnonzero(schedule.mini_batch_M == number)
        ]
        for now, following in pairwise(of_micro_batch):
            assert min(now) >= max(following)


@settings(max_examples=40)
@given(steps())
def test_mini_batches_are_whole_units_in_order_and_even(step):
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
def test_runs_of_one_rank_keep_the_order_and_end_none_too_early(tokens, limit):
    runs = cut_into_runs(tokens, limit)
    assert [s for run in runs for s in run] == list(range(len(tokens)))
    for run in runs:
        assert len(run) == 1 or sum(tokens[s] for s in run) <= limit
    for run, following in pairwise(runs):
        assert sum(tokens[s] for s in [*run, following[0]]) > limit
