"""A timeline survives its file, adds up by rank, opens as a trace, and a damaged file is refused by line."""

import itertools
import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import TraceError
from relibra.timeline import (
    LABELS,
    MAX_LINE_BYTES,
    Event,
    Timeline,
    TimelineRecorder,
    merged,
    read_timeline,
    write_timeline,
)

SECONDS = st.floats(0, 1e9)
WHOLE = st.integers(0, 1 << 53)


@st.composite
def timelines(draw) -> Timeline:
    num_ranks = draw(st.integers(1, 5))
    event = st.builds(
        lambda between, **fields: Event(**fields, bytes_between_nodes=min(between, fields["bytes"])),
        between=WHOLE,
        stage=st.text(min_size=1, max_size=100) | st.sampled_from(["push", "wait push", "experts"]),
        layer=st.integers(-1, 1 << 53),
        micro_batch=st.integers(-1, 1 << 53),
        rank=st.integers(0, num_ranks - 1),
        start=SECONDS,
        seconds=SECONDS,
        bytes=WHOLE,
        label=st.text(max_size=200),
    )
    events = tuple(draw(st.lists(event, max_size=8)))
    return Timeline(events=events, num_ranks=num_ranks, label=draw(st.sampled_from(LABELS)), origin=draw(SECONDS))


def event(stage="experts", *, layer=0, micro_batch=0, rank=0, start=0.0, seconds=1.0, bytes=0, label="") -> Event:
    return Event(stage, layer, micro_batch, rank, start, seconds, bytes, label)


def timeline(*events, num_ranks=2, **fields) -> Timeline:
    return Timeline(events=events, num_ranks=num_ranks, label=fields.pop("label", "simulated"), **fields)


@given(timelines())
def test_a_timeline_survives_its_file(tmp_path_factory, given_timeline):
    path = tmp_path_factory.mktemp("timelines") / "timeline.jsonl"
    write_timeline(path, given_timeline)
    assert read_timeline(path) == given_timeline
    content = path.read_bytes()
    write_timeline(path, read_timeline(path))
    assert path.read_bytes() == content
    assert len(content.splitlines()) == 1 + len(given_timeline.events)
    assert [file.name for file in path.parent.iterdir()] == ["timeline.jsonl"]


@given(timelines())
def test_totals_are_sums_over_events(given_timeline):
    for stage in {one.stage for one in given_timeline.events}:
        total_R = given_timeline.seconds(stage)
        assert total_R.shape == (given_timeline.num_ranks,)
        for rank, total in enumerate(total_R):
            own = [e.seconds for e in given_timeline.events if e.rank == rank and e.stage == stage]
            assert total == pytest.approx(sum(own))


def test_what_is_exposed_is_what_waits():
    both = timeline(
        event("wait push", rank=1, seconds=2.0),
        event("wait return", rank=1, seconds=0.5),
        event("push", rank=0, seconds=9.0),
        event("await", rank=0, seconds=9.0),
    )
    assert both.exposed_seconds().tolist() == [0.0, 2.5]
    assert both.seconds("push").tolist() == [9.0, 0.0]
    assert both.seconds("combine").tolist() == [0.0, 0.0]


def test_a_recorder_takes_blocks_and_finished_events():
    recorder = TimelineRecorder(rank=1, num_ranks=2)
    begun = time.perf_counter()
    with recorder.record("experts", layer=3, micro_batch=1):
        time.sleep(0.02)
    with pytest.raises(KeyError), recorder.record("dispatch"):
        raise KeyError
    recorder.add("push", start=begun, seconds=0.01, layer=3, micro_batch=1, bytes=7, label="expert 5")
    taken = recorder.timeline()
    assert [one.stage for one in taken.events] == ["experts", "dispatch", "push"]
    experts, dispatch, push = taken.events
    assert 0.02 <= experts.seconds < 1
    assert (experts.layer, experts.micro_batch, experts.rank) == (3, 1, 1)
    assert (dispatch.layer, dispatch.micro_batch) == (-1, -1)
    assert experts.start + experts.seconds <= dispatch.start
    assert 0 <= push.start <= experts.start
    assert push[5:] == (0.01, 7, "expert 5", 0)
    assert taken.label == "measured"
    assert abs(taken.origin + push.start - time.time()) < 60


def test_recording_costs_a_few_microseconds():
    recorder = TimelineRecorder(rank=0, num_ranks=1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for layer in range(100):
            with recorder.record("experts", layer=layer, micro_batch=0):
                pass
        times.append((time.perf_counter() - start) / 100)
    assert min(times) < 20e-6


def test_threads_record_into_one_timeline():
    recorder = TimelineRecorder(rank=0, num_ranks=1)

    def work():
        for layer in range(500):
            with recorder.record("push", layer=layer, micro_batch=0):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.layer for one in recorder.timeline().events) == sorted([*range(500)] * 4)


def test_ranks_become_one_timeline_by_the_earliest_origin():
    late = timeline(event("push", rank=1, start=1.0), origin=100.5)
    early = timeline(event("push", rank=0, start=1.0), event("experts", rank=0, start=2.0), origin=100.0)
    run = merged([late, early])
    assert run.origin == 100.0
    assert [(one.rank, one.start) for one in run.events] == [(1, 1.5), (0, 1.0), (0, 2.0)]
    assert merged([early]) == early


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"timelines of \(label, ranks\) \[\] are not of one run"),
        ([timeline(), timeline(num_ranks=3)], r"\[\('simulated', 2\), \('simulated', 3\)\] are not of one run"),
        ([timeline(), timeline(label="measured")], "are not of one run"),
        ([timeline(event(rank=1)), timeline(event(rank=1), event(rank=0))], r"ranks \[1\] have events in two"),
    ],
)
def test_timelines_that_make_no_run_are_refused(parts, message):
    with pytest.raises(TraceError, match=message):
        merged(parts)


@given(timelines())
def test_a_trace_holds_every_event_without_overlaps(given_timeline):
    trace = json.loads(json.dumps(given_timeline.perfetto()))["traceEvents"]
    slices = [one for one in trace if one["ph"] == "X"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in trace if one["name"] == "thread_name"}
    as_events = sorted((one["pid"], one["cat"], one["ts"], one["dur"], one["args"]["bytes"]) for one in slices)
    assert as_events == sorted(
        (e.rank, e.stage, e.start * 1e6, e.seconds * 1e6, e.bytes) for e in given_timeline.events
    )
    assert len({(one["pid"], one["cat"], one["tid"]) for one in slices}) == len(names)
    for track, name in names.items():
        own = sorted((one["ts"], one["dur"]) for one in slices if (one["pid"], one["tid"]) == track)
        assert all(a + length <= b + 1e-6 * (1 + b) for (a, length), (b, _) in itertools.pairwise(own))
        assert all(name.startswith(one["cat"]) for one in slices if (one["pid"], one["tid"]) == track)


def test_a_trace_names_ranks_stages_and_places(tmp_path):
    timeline(
        event("push", layer=3, micro_batch=1, rank=1, start=0.5, seconds=0.25, bytes=8, label="expert 2"),
        event("push", layer=4, micro_batch=1, rank=1, start=0.6, seconds=0.25),
        event("step", layer=-1, micro_batch=-1),
        label="simulated",
    ).save_perfetto(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["label"] == "simulated"
    assert [one["name"] for one in trace["traceEvents"] if one["ph"] == "X"] == ["step", "push L3 m1", "push L4 m1"]
    assert {one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    tracks = [one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"]
    assert sorted(tracks) == ["push", "push 2", "step"]
    push = next(one for one in trace["traceEvents"] if one["name"] == "push L3 m1")
    assert (push["ts"], push["dur"], push["pid"]) == (0.5e6, 0.25e6, 1)
    assert push["args"] == {"layer": 3, "micro_batch": 1, "bytes": 8, "bytes_between_nodes": 0, "label": "expert 2"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (event(rank=2), "event 0 .*: rank is 2: at most 1 is possible"),
        (event(layer=-2), "layer is -2"),
        (event(micro_batch=True), "micro_batch is True"),
        (event(bytes=-1), "bytes is -1"),
        (event(start=-0.1), "start is -0.1: "),
        (event(seconds=float("nan")), "seconds is nan"),
        (event(seconds=float("inf")), "seconds is inf"),
        (event(""), "stage is ''"),
        (event(label="x" * 201), "label is 'xx"),
    ],
)
def test_events_that_cannot_be_are_refused(tmp_path, wrong, message):
    for action in (timeline(wrong).validate, lambda: write_timeline(tmp_path / "x.jsonl", timeline(wrong))):
        with pytest.raises(TraceError, match=message):
            action()
    assert not list(tmp_path.iterdir())


def test_timelines_that_cannot_be_are_refused():
    for fields, message in (
        ({"label": "guessed"}, "label is 'guessed'"),
        ({"num_ranks": 0}, "ranks is 0: "),
        ({"origin": float("nan")}, "origin is nan"),
    ):
        with pytest.raises(TraceError, match=message):
            replace(timeline(), **fields).validate()


LINES = [
    '{"format": "relibra timeline", "version": 3, "label": "measured", "origin": 5.0, "ranks": 2, "events": 2, '
    '"sha256": "a2c1cc0cac79ee090ef399f0203f45d83c87002a4958248534ff2b568e683379"}',
    '{"stage": "push", "layer": 0, "micro_batch": 0, "rank": 1, "start": 0, "seconds": 1.5, "bytes": 3, "label": "", '
    '"bytes_between_nodes": 2}',
    '{"stage": "step", "layer": -1, "micro_batch": -1, "rank": 0, "start": 0, "seconds": 2, "bytes": 0, "label": "", '
    '"bytes_between_nodes": 0}',
]


def write_lines(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


def test_the_format_is_what_it_was(tmp_path):
    found = read_timeline(write_lines(tmp_path / "t.jsonl", LINES))
    assert found.events[0] == Event("push", 0, 0, 1, 0.0, 1.5, 3, "", 2)
    assert type(found.events[0].start) is float
    assert (found.origin, found.num_ranks, found.label) == (5.0, 2, "measured")


def test_any_changed_bit_is_noticed(tmp_path):
    """Without a checksum 232 of 1,500 changed bits of a timeline were read back as another timeline."""
    path, kept = tmp_path / "t.jsonl", timeline(event("push", rank=1, start=0.125, label="ab"), event("step", bytes=77))
    write_timeline(path, kept)
    assert read_timeline(path) == kept
    data = path.read_bytes()
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with suppress(TraceError):
            assert read_timeline(path) == kept, f"bit {place}"


@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (1, "relibra timeline", "plan", ":1: this is no header of a timeline"),
        (1, '"version": 3', '"version": 2', ":1: the timeline has version 2, this relibra reads 3"),
        (1, '"version": 3', '"version": true', ":1: this is no header"),
        (1, '"ranks": 2', '"ranks": 1000000', ":1: the header: ranks is 1000000"),
        (1, '"events": 2', '"events": 1e3', ":1: the header: events is 1000.0"),
        (1, '"events": 2', '"events": 999999999999', ":1: the header: events is 999999999999"),
        (1, '"events": 2', '"events": 3', ":4: the line is missing or cut off"),
        (1, '"events": 2', '"events": 1', ":3: the header announces 1 events only"),
        (1, '"measured"', '["measured"]', ":1: the header: label is"),
        (1, ', "origin": 5.0', "", r":1: the header has no entry 'origin'"),
        (2, '"rank": 1', '"rank": 2', ":2: the event: rank is 2"),
        (2, '"layer": 0', '"layer": 0.5', ":2: the event: layer is 0.5"),
        (2, '"seconds": 1.5', '"seconds": NaN', ":2: the event: seconds is nan"),
        (2, '"seconds": 1.5', '"seconds": "1.5"', ":2: the event: seconds is '1.5'"),
        (2, '"seconds": 1.5', '"seconds": ' + "9" * 400, ":2: the event: seconds is 9"),
        (2, '"bytes": 3', '"bytes": 3, "more": 1', ":2: the event has unknown entry 'more'"),
        (2, '"bytes": 3', '"rank": 1', ":2: the line is no JSON .*a key occurs twice"),
        (2, '"stage": "push"', '"stage": ["push"]', ":2: the event: stage is"),
        (2, '"bytes_between_nodes": 2', '"bytes_between_nodes": 4', ":2: the event: bytes_between_nodes is 4"),
        (2, '"bytes_between_nodes": 2}', '"bytes_between_nodes": 2', ":2: the line is no JSON"),
        (2, LINES[1], "", ":2: the line is no JSON"),
        (2, LINES[1], "[1, 2]", ":2: the line holds no JSON object"),
        (2, LINES[1], "[" * (MAX_LINE_BYTES - 1), ":2: the line is no JSON"),
        (3, '"label": ""', '"label": "' + "x" * MAX_LINE_BYTES + '"', f":3: the line is longer than {MAX_LINE_BYTES}"),
    ],
)
def test_a_damaged_line_is_refused_by_its_number(tmp_path, line, old, new, message):
    lines = list(LINES)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path = write_lines(tmp_path / "t.jsonl", lines)
    with pytest.raises(TraceError, match=re.escape(str(path)) + message):
        read_timeline(path)


def test_files_that_end_early_or_are_none_are_refused(tmp_path):
    with pytest.raises(TraceError, match=":3: the line is missing or cut off"):
        read_timeline(write_lines(tmp_path / "t.jsonl", LINES, end=""))
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match=":1: the line is no JSON"):
        read_timeline(tmp_path / "t.jsonl")
    with pytest.raises(TraceError, match=r"nothing\.jsonl cannot be read"):
        read_timeline(tmp_path / "nothing.jsonl")
    with pytest.raises(TraceError, match="cannot be read"):
        read_timeline(tmp_path)
    timeline(event("push")).save_perfetto(tmp_path / "step.json")
    with pytest.raises(TraceError, match=r"a trace for Perfetto opens at ui\.perfetto\.dev"):
        read_timeline(tmp_path / "step.json")
