"""`Timeline`: events of each rank with start, duration and bytes, measured or simulated.

Writers choose the names of stages ("push", "dispatch", "experts", "step", ...). A stage that begins with "wait" is time
in which the rank did nothing else (`exposed_seconds`).

A file holds a header and one event per line, as JSON. The header has a SHA-256 of its other fields and of those lines.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray
from pydantic import Field

from relibra.errors import TraceError
from relibra.field_checks import check_fields
from relibra.files import atomic_path, write_text

FORMAT, VERSION = "relibra timeline", 3
LABELS = ("measured", "model", "simulated", "cited")
"""Where times come from, as in result rows: this is `Timeline.label`; `Event.label` is another thing."""
MAX_EVENTS, MAX_RANKS, MAX_LINE_BYTES = 1 << 24, 1 << 15, 1 << 13
NO_TIMELINE = "name a file of write_timeline; a trace for Perfetto opens at ui.perfetto.dev"
_ARGS = ("layer", "micro_batch", "bytes", "bytes_between_nodes", "label")  # of a slice of a Chrome trace
_LARGEST = 1 << 53  # largest whole number that every JSON reader keeps
Place = Annotated[int, Field(ge=-1, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Seconds = Annotated[float, Field(ge=0, le=_LARGEST)]


class Event(NamedTuple):
    """One stage of one rank.

    layer, micro_batch   -1 if they do not apply
    start, seconds       begin, in seconds since the origin of the timeline, and duration
    bytes                moved by the rank, 0 if nothing moves
    label                what is moved or done, in words; may be empty
    bytes_between_nodes  of `bytes`, those for other nodes; 0 in simulated events: `SimulatedStep.bytes` has the sums
    """

    stage: Annotated[str, Field(min_length=1, max_length=100)]
    layer: Place
    micro_batch: Place
    rank: Count
    start: Seconds
    seconds: Seconds
    bytes: Count
    label: Annotated[str, Field(max_length=200)]
    bytes_between_nodes: Count = 0


class _Header(NamedTuple):
    """First line of a file."""

    format: str
    version: int
    label: Literal["measured", "model", "simulated", "cited"]
    origin: Seconds
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    events: Annotated[int, Field(ge=0, le=MAX_EVENTS)]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Events of one run, in the order in which they were recorded.

    origin      Unix time in seconds that `start` counts from; 0 in a simulation
    num_ranks   of the run, including those without events
    label       where times come from, one of LABELS
    """

    events: tuple[Event, ...]
    num_ranks: int
    label: str
    origin: float = 0.0

    def validate(self) -> None:
        """Raise TraceError for an invalid field or event."""
        check_fields(_Header, {**_header_of(self), "sha256": ""}, "the timeline", TraceError)
        for number, event in enumerate(self.events):
            _checked(event._asdict(), self.num_ranks, f"event {number} of the timeline")

    def seconds(self, stage: str) -> Float64[ndarray, " R"]:
        """Return the seconds of each rank in a stage; overlapping events all count."""
        return self._total(event for event in self.events if event.stage == stage)

    def exposed_seconds(self) -> Float64[ndarray, " R"]:
        """Return the seconds that each rank waited: all stages that begin with "wait"."""
        return self._total(event for event in self.events if event.stage.startswith("wait"))

    def perfetto(self, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Return a Chrome trace for ui.perfetto.dev: a process per rank, a track per stage.

        Overlapping events of a stage get separate tracks, because slices of one track have to nest.

        notes   what a reader has to know beside the events
        """
        slices: list[dict[str, Any]] = []
        tracks: dict[tuple[int, str, int], int] = {}
        ends: dict[tuple[int, str], list[float]] = {}  # end of the last event in each lane of a stage
        for event in sorted(self.events, key=lambda event: (event.start, event.rank)):
            lanes = ends.setdefault((event.rank, event.stage), [])
            lane = next((i for i, end in enumerate(lanes) if end <= event.start), len(lanes))
            lanes[lane : lane + 1] = [event.start + event.seconds]  # one more lane where none is free
            track = tracks.setdefault((event.rank, event.stage, lane), len(tracks) + 1)
            slices.append(_slice(event, track))
        return {
            "traceEvents": [*_names(tracks), *slices],
            "displayTimeUnit": "ms",
            "otherData": {
                "format": FORMAT,
                "version": VERSION,
                "label": self.label,
                "origin": self.origin,
                **({"notes": list(notes)} if notes else {}),
            },
        }

    def save_perfetto(self, path: Path | str, notes: Sequence[str] = ()) -> None:
        """Write `perfetto(notes)` as JSON, whole or not at all."""
        write_text(Path(path), json.dumps(self.perfetto(notes), allow_nan=False) + "\n")

    def _total(self, events: Iterable[Event]) -> Float64[ndarray, " R"]:
        seconds_R = np.zeros(self.num_ranks)
        for event in events:
            seconds_R[event.rank] += event.seconds
        return seconds_R


class TimelineRecorder:
    """Records the events of one rank by its host clock, in a few microseconds each; any thread may add one.

    A stage that only enqueues work on an accelerator looks short: it lasts until the host goes on.
    """

    def __init__(self, rank: int, num_ranks: int, most: int | None = None) -> None:
        """Start the clock: the origin is now.

        most   events that are kept, the latest; None: all
        """
        self._rank, self._num_ranks = rank, num_ranks
        self._origin, self._zero = time.time(), time.perf_counter()
        self._events: deque[Event] = deque(maxlen=most)

    @contextmanager
    def record(
        self,
        stage: str,
        *,
        layer: int = -1,
        micro_batch: int = -1,
        bytes: int = 0,
        label: str = "",
        bytes_between_nodes: int = 0,
    ) -> Iterator[None]:
        """Add an event that lasts as long as the block, also if that raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds, where = time.perf_counter() - start, (stage, layer, micro_batch, self._rank)
            self._events.append(Event(*where, start - self._zero, seconds, bytes, label, bytes_between_nodes))

    def add(
        self,
        stage: str,
        *,
        start: float,
        seconds: float,
        layer: int = -1,
        micro_batch: int = -1,
        bytes: int = 0,
        label: str = "",
    ) -> None:
        """Add an event with given times; `start` by `time.perf_counter`."""
        self._events.append(Event(stage, layer, micro_batch, self._rank, start - self._zero, seconds, bytes, label))

    def seconds(self, stage: str) -> float:
        """Return the seconds of the events of a stage that are kept."""
        return sum(event.seconds for event in self._events if event.stage == stage)

    def timeline(self) -> Timeline:
        """Return the events recorded so far.

        raises   TraceError for an invalid event
        """
        timeline = Timeline(
            events=tuple(self._events), num_ranks=self._num_ranks, label="measured", origin=self._origin
        )
        timeline.validate()
        return timeline


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Return the timelines of the ranks of one run as one; the origin is the earliest.

    Starts on different machines are as accurate as their system clocks.

    raises   TraceError for no timelines, or for some that differ in label or number of ranks or have a rank in common
    """
    kinds = sorted({(item.label, item.num_ranks) for item in timelines})
    if len(kinds) != 1:
        raise TraceError(
            f"timelines of (label, ranks) {kinds} are not of one run: merge one timeline per rank of a single run"
        )
    timelines_of = Counter(rank for item in timelines for rank in {event.rank for event in item.events})
    twice = sorted(rank for rank, count in timelines_of.items() if count > 1)
    if twice:
        raise TraceError(f"ranks {twice} have events in two timelines: pass each rank of a run once")
    origin = min(item.origin for item in timelines)
    events = [event._replace(start=event.start + (item.origin - origin)) for item in timelines for event in item.events]
    label, num_ranks = kinds[0]
    return Timeline(events=tuple(events), num_ranks=num_ranks, label=label, origin=origin)


def write_timeline(path: Path | str, timeline: Timeline) -> None:
    """Write a timeline, whole or not at all.

    raises   TraceError for an invalid timeline
    """
    timeline.validate()
    header = _header_of(timeline)
    digest = _digest_of(header)
    for line in _lines(timeline):
        digest.update(line)
    with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
        file.write(json.dumps({**header, "sha256": digest.hexdigest()}).encode() + b"\n")
        file.writelines(_lines(timeline))


def _header_of(timeline: Timeline) -> dict[str, Any]:
    """Return the fields of the header without the SHA-256."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "label": timeline.label,
        "origin": timeline.origin,
        "ranks": timeline.num_ranks,
        "events": len(timeline.events),
    }


def _lines(timeline: Timeline) -> Iterator[bytes]:
    """Yield the line of each event."""
    return (json.dumps(event._asdict(), allow_nan=False).encode() + b"\n" for event in timeline.events)


def _digest_of(header: Mapping[str, Any]) -> Any:
    """Return the `hashlib` digest of a header's other fields, to be updated with the lines behind it."""
    rest = {name: value for name, value in header.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode())


def read_timeline(path: Path | str) -> Timeline:
    """Return the timeline in a file of `write_timeline`.

    raises   TraceError, with the line number, for a file that is missing, damaged, of another version or format
    """
    path = Path(path)
    events: list[Event] = []
    try:
        with path.open("rb") as file:
            header = _header(_object(file.readline(MAX_LINE_BYTES + 1), path, 1), path)
            digest = _digest_of(header)
            for number in range(2, header["events"] + 2):
                line = file.readline(MAX_LINE_BYTES + 1)
                digest.update(line)
                fields = _object(line, path, number)
                events.append(_checked(fields, header["ranks"], f"{path}:{number}: the event"))
            if file.read(1):
                raise TraceError(f"{path}:{header['events'] + 2}: the header announces {header['events']} events only")
            if digest.hexdigest() != header["sha256"]:
                raise TraceError(f"{path} is damaged: its SHA-256 does not match its content; write it again")
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}): {NO_TIMELINE}") from error
    return Timeline(
        events=tuple(events), num_ranks=header["ranks"], label=header["label"], origin=float(header["origin"])
    )


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return the object in one line."""
    where = f"{path}:{number}"
    if not line.endswith(b"\n"):
        what = f"is longer than {MAX_LINE_BYTES} bytes" if len(line) > MAX_LINE_BYTES else "is missing or cut off"
        raise TraceError(f"{where}: the line {what}: {NO_TIMELINE}")
    try:
        value = json.loads(line, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, too deep nesting, a repeated key
        raise TraceError(f"{where}: the line is no JSON ({error}): {NO_TIMELINE}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{where}: the line holds no JSON object: {NO_TIMELINE}")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _header(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    if fields.get("format") != FORMAT or type(fields.get("version")) is not int:
        raise TraceError(f"{path}:1: this is no header of a timeline: {NO_TIMELINE}")
    if fields["version"] != VERSION:
        raise TraceError(
            f"{path}:1: the timeline has version {fields['version']}, this relibra reads {VERSION}: use the relibra "
            "that wrote it"
        )
    check_fields(_Header, fields, f"{path}:1: the header", TraceError)
    return fields


def _checked(fields: dict[str, Any], num_ranks: int, where: str) -> Event:
    """Return the event of these fields; raises TraceError."""
    check_fields(Event, fields, where, TraceError)
    event = Event(**fields)
    for name, most in (("rank", num_ranks - 1), ("bytes_between_nodes", event.bytes)):
        if getattr(event, name) > most:
            raise TraceError(f"{where}: {name} is {getattr(event, name)!r}: at most {most} is possible")
    return event._replace(start=float(event.start), seconds=float(event.seconds))


def _slice(event: Event, track: int) -> dict[str, Any]:
    """Return a "complete" event of the Chrome trace format; times in microseconds."""
    where = [f"L{event.layer}"] * (event.layer >= 0) + [f"m{event.micro_batch}"] * (event.micro_batch >= 0)
    return {
        "ph": "X",
        "name": " ".join([event.stage, *where]),
        "cat": event.stage,
        "pid": event.rank,
        "tid": track,
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": {name: getattr(event, name) for name in _ARGS},
    }


def _names(tracks: Mapping[tuple[int, str, int], int]) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that name processes and tracks."""
    for rank in sorted({rank for rank, _, _ in tracks}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for (rank, stage, lane), track in tracks.items():
        name = stage if lane == 0 else f"{stage} {lane + 1}"
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
