"""Timelines of workers: recorded where they compute, sent as a frame, merged into one of the deployment.

Attention workers are the first ranks, expert workers the others, as in the simulator. Stages: "attention" of a layer,
up to its rows for experts (layer -1: from the last experts to the logits), "await experts", in which another
micro-batch may compute, "experts", and "wait", in which an expert worker has no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from relibra.errors import TraceError, in_a_line
from relibra.serving.layout import WorkerLayout
from relibra.timeline import Event, Timeline, TimelineRecorder, merged

MOST_EVENTS = 1 << 16
"""Events that a worker keeps: the latest."""


def worker_recorder(layout: WorkerLayout, role: str, number: int) -> TimelineRecorder:
    """Return the recorder of a worker; its clock starts now."""
    rank = number + (layout.attention if role == "experts" else 0)
    return TimelineRecorder(rank, layout.attention + layout.experts, most=MOST_EVENTS)


def timeline_frame(recorder: TimelineRecorder | None) -> dict[str, Any]:
    """Return what a worker has recorded; without a recorder no events."""
    if recorder is None:
        return {"origin": 0.0, "events": []}
    timeline = recorder.timeline()
    return {"origin": timeline.origin, "events": [list(event) for event in timeline.events]}


def deployment_timeline(layout: WorkerLayout, frames: Sequence[dict[str, Any]]) -> Timeline:
    """Return one timeline from the frames of one worker or more."""
    ranks = layout.attention + layout.experts
    timelines = [
        Timeline(
            events=tuple(Event(*event) for event in frame["events"]),
            num_ranks=ranks,
            label="measured",
            origin=frame["origin"],
        )
        for frame in frames
    ]
    timeline = merged(timelines)
    timeline.validate()
    return timeline


def write_timeline(
    path: Path, layout: WorkerLayout, frames: Sequence[dict[str, Any]], lost: Iterable[tuple[str, float]]
) -> list[str]:
    """Write what workers recorded for Perfetto; return lines to print about it.

    lost   workers, and Unix times at which a process of theirs was gone; what it had recorded is missing, and the file
           says so in its notes
    """
    if not frames:
        return [f"no worker is left whose events could be written: {path} is not written"]
    try:
        timeline = deployment_timeline(layout, frames)
        notes = [
            f"events of {worker} until second {max(0.0, at - timeline.origin):.1f} are missing: it ended before it "
            "sent them"
            for worker, at in lost
        ]
        timeline.save_perfetto(path, notes)
    except (OSError, TraceError) as error:
        return [f"the timeline cannot be written to {path}: {in_a_line(error)}"]
    written = f"{len(timeline.events):,} events of {len(frames)} workers in {path}: open it at ui.perfetto.dev"
    return [*notes, written]
