from benchmarks.simulation.timeline_difference import diff_timelines
from relibra.timeline import Event, Timeline


def of(*events, label="simulated"):
    return Timeline(events=tuple(Event(*event) for event in events), num_ranks=4, label=label)


DISPATCH, COMBINE = ("dispatch", 0, 0, 1, 0.0, 2.0, 10, ""), ("combine", 0, 0, 1, 2.0, 1.0, 20, "")


def test_the_order_alone_decides_equality():
    again = [("dispatch", 0, 0, 1, 5.0, 3.0, 11, "x"), ("combine", 0, 0, 1, 9.0, 9.0, 0, "y")]
    found = diff_timelines(of(DISPATCH, COMBINE, label="measured"), of(*again))
    assert found.same_order
    assert (found.num_events, found.first_difference) == (2, None)
    assert found.labels == ("measured", "simulated")
    (combine, dispatch) = found.stages
    assert (combine.stage, combine.events, combine.seconds, combine.bytes) == ("combine", (1, 1), (1.0, 9.0), (20, 0))
    assert dispatch.seconds == (2.0, 3.0)


def test_another_order_is_told_by_its_first_event():
    found = diff_timelines(of(DISPATCH, COMBINE), of(COMBINE, DISPATCH))
    assert not found.same_order
    assert found.first_difference == (1, 0, ("dispatch", 0, 0), ("combine", 0, 0), True)


def test_missing_events_and_ranks_are_told():
    other_rank = ("dispatch", 0, 0, 2, 0.0, 1.0, 0, "")
    found = diff_timelines(of(DISPATCH, COMBINE, other_rank), of(DISPATCH, COMBINE, COMBINE))
    assert found.first_difference == (1, 2, None, ("combine", 0, 0), False)
    assert found.wrong_ranks == (1, 2)


def test_stages_of_one_side_are_named():
    other_rank, attention = ("dispatch", 0, 0, 2, 0.0, 1.0, 0, ""), ("attention", 0, 0, 1, 0.0, 1.0, 0, "")
    found = diff_timelines(of(DISPATCH, other_rank), of(other_rank, attention, DISPATCH, COMBINE))
    assert found.same_order
    assert found.only_second == ("attention", "combine")


def test_two_empty_timelines_are_alike():
    assert diff_timelines(of(), of()).same_order
