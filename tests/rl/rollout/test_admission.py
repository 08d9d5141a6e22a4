"""Admission, windows and the checks that hold them together."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import TraceError
from relibra.rl.rollout.admission import SampleCursor, check_no_response_lost, check_versions, plan_admission
from relibra.rl.rollout.response import new_response
from tests.rl.made_up import window_of


@given(
    st.integers(1, 40).flatmap(
        lambda slots: st.tuples(
            st.just(slots),
            st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), max_size=slots, unique_by=lambda one: one[0]),
        )
    ),
    st.integers(1, 7),
)
def test_live_responses_go_first_and_fresh_ones_fill_the_rest(case, num_ranks):
    slots, live = case
    cursor = SampleCursor(next_sample=100)
    admission = plan_admission(live, slots, cursor, num_ranks)
    assert len(admission.rank_of) == slots
    assert set(admission.rank_of) == {sample for sample, _ in live} | set(admission.begun)
    assert admission.begun == list(range(100, 100 + slots - len(live)))
    assert admission.cursor == SampleCursor(next_sample=100 + len(admission.begun))
    counts = np.bincount(list(admission.rank_of.values()), minlength=num_ranks)
    assert counts.max() - counts.min() <= 1
    for windows in range(1, 6):  # long prefixes are spread as evenly as everything else
        long = [admission.rank_of[sample] for sample, age in live if age >= windows]
        counts = np.bincount(long, minlength=num_ranks)
        assert counts.max() - counts.min() <= 1
    assert admission == plan_admission(live[::-1], slots, cursor, num_ranks), "the order of reports decides nothing"


@given(st.integers(1, 5), st.integers(1, 30), st.data())
def test_kept_responses_stay_while_a_rank_has_places(num_ranks, slots, data):
    """Also after a resume on fewer ranks, where some have to move."""
    ranks_before = data.draw(st.integers(num_ranks, 6))
    kept_on = {s: data.draw(st.integers(0, ranks_before - 1)) for s in range(data.draw(st.integers(0, slots)))}
    live = [(sample, 1 + sample % 3) for sample in kept_on]
    rank_of = plan_admission(live, slots, SampleCursor(next_sample=50), num_ranks, kept_on).rank_of
    counts = np.bincount(list(rank_of.values()), minlength=num_ranks)
    assert counts.sum() == slots
    assert counts.max() - counts.min() <= 1
    for rank in range(num_ranks):
        there = [sample for sample, home in kept_on.items() if home == rank]
        stayed = sum(rank_of[sample] == rank for sample in there)
        assert stayed == min(len(there), len(range(rank, slots, num_ranks)))


def test_admission_of_a_small_case_is_what_the_rule_says():
    admission = plan_admission([(4, 1), (1, 2), (9, 2)], slots=5, cursor=SampleCursor(next_sample=12), num_ranks=2)
    assert admission.rank_of == {1: 0, 9: 1, 4: 0, 12: 1, 13: 0}
    admission = plan_admission([(4, 1)], slots=4, cursor=SampleCursor(next_sample=12, passed_over=(7, 9)), num_ranks=2)
    assert admission.rank_of == {4: 0, 7: 1, 9: 0, 12: 1}, "those passed over begin first"
    assert admission.cursor == SampleCursor(next_sample=13)


@given(st.integers(1, 5), st.integers(0, 9), st.sets(st.integers(0, 8)), st.data())
def test_unused_spares_begin_next_and_none_begins_twice(num_ranks, start, skipped, data):
    """Each rank uses some of its spares, step after step; what has begun and what has not are all there is."""
    cursor = SampleCursor(next_sample=start, passed_over=tuple(sorted(sample for sample in skipped if sample < start)))
    begun = set(range(start)) - set(cursor.passed_over)
    for _ in range(4):
        used_R = [data.draw(st.integers(0, 4)) for _ in range(num_ranks)]
        own_R = [list(islice(cursor.spares(rank, num_ranks), used)) for rank, used in enumerate(used_R)]
        used = [sample for own in own_R for sample in own]
        assert len(set(used)) == len(used)
        assert not begun & set(used)
        assert all(own == sorted(own) for own in own_R)
        waiting = set(cursor.passed_over)
        cursor = cursor.without(used)
        begun |= set(used)
        assert cursor.started == len(begun)
        assert set(cursor.passed_over) == set(range(cursor.next_sample)) - begun
        assert list(islice(cursor.ids(), 50)) == sorted(set(range(200)) - begun)[:50], "in order, and none is skipped"
        assert waiting - set(used) <= set(cursor.passed_over)
    with pytest.raises(AssertionError, match="begins twice"):
        cursor.without([*begun, cursor.next_sample][:1] * 2)


def test_more_live_responses_than_places_are_a_bug():
    cursor = SampleCursor(next_sample=9, passed_over=(5,))
    with pytest.raises(AssertionError, match=r"3 responses .* 2 slots"):
        plan_admission([(0, 1), (1, 1), (2, 1)], 2, cursor, 1)
    with pytest.raises(AssertionError, match="live twice"):
        plan_admission([(0, 1), (0, 1)], 2, cursor, 1)
    with pytest.raises(AssertionError, match="never started"):
        plan_admission([(9, 1)], 2, cursor, 1)
    with pytest.raises(AssertionError, match="never started"):
        plan_admission([(5, 1)], 2, cursor, 1)


def test_a_response_that_lives_too_long_is_found_out():
    check_no_response_lost(started=3, finished=1, live=[(0, 2), (2, 1)], slots=2, max_windows=3)
    with pytest.raises(AssertionError, match="sample 0 goes on after 3 windows of 3"):
        check_no_response_lost(started=3, finished=1, live=[(0, 3), (2, 1)], slots=2, max_windows=3)


@pytest.mark.parametrize("length", range(1, 25))
def test_windows_cover_each_response_token_once(length):
    window, longest, prompt, steps = 8, 24, [1, 2, 3], 0
    response = new_response(7, 1, prompt)
    while response.finish_reason is None:
        added = min(window, length - response.length)
        stopped = response.length + added == length and length < longest
        rows = len(prompt) + response.length + added - 1
        response = response.extended(
            window_of(added, rows=rows, stopped=stopped, seed=steps), weight_version=steps, max_response=longest
        )
        check_versions([response], steps)
        steps += 1
        assert response.window_length == added
        assert response.windows == steps
        assert len(response.experts_mLK) == len(response.tokens_n) - 1
    assert response.length == length
    assert response.finish_reason == ("length" if length == longest else "stop")
    assert response.versions_r.tolist() == [t // window for t in range(length)]
    assert steps <= longest // window


def test_a_window_of_other_weights_is_refused():
    response = new_response(12, 3, [1, 2]).extended(
        window_of(4, rows=5, stopped=False), weight_version=3, max_response=8
    )
    response = response.extended(window_of(4, rows=9, stopped=False), weight_version=4, max_response=8)
    check_versions([response], 4)
    with pytest.raises(
        TraceError, match=r"sample 12: response token 4 .* version 4, and the step starts from version 5"
    ):
        check_versions([response], 5)
    response.versions_r[6] = 3
    with pytest.raises(TraceError, match=r"response token 6 .* version 3, and the step starts from version 4"):
        check_versions([response], 4)
