"""Timelines of workers: recorded where they compute, told as a frame, one for the deployment in the end.

Attention workers are the first ranks, expert workers the others, as in the simulator. Stages: "attention", up to the
rows for experts of a layer (-1: from the last of them to the logits), "await experts", in which another micro-batch may
compute, "experts", and "wait", in which an expert worker has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Return the timeline of the workers that told theirs, of which there is one at least."""
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
