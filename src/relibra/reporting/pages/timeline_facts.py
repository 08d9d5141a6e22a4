"""Timelines, simulated or measured, as timeline.js draws them: what each rank does at which time."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from relibra.reporting.data.step_simulation import MAX_RANKS, choose_ranks
from relibra.timeline import Timeline

MAX_EVENTS = 40_000
"""Events of one timeline: 10 to 20 bytes each on the page."""

LANES = {
    "work": ("attention", "experts", "at home", "optimizer"),
    "rows": ("dispatch", "dispatch in node", "combine", "combine in node"),
    "copies": ("push", "return", "wait push", "wait return", "gradients"),
}
"""Stages that run beside each other on a rank have a lane each; unknown stages are drawn as work."""


def timeline_facts(timelines: Sequence[tuple[str, Timeline]], first_layer: int) -> dict[str, Any] | None:
    """Return timelines on one scale of time; None without events.

    timelines     (name, timeline); of one with more than MAX_EVENTS events the first ones are shown
    first_layer   decoder layer to begin with
    """
    drawn = [(name, timeline, select_events(timeline)) for name, timeline in timelines if timeline.events]
    if not drawn:
        return None
    layers = sorted({event.layer for _, _, shown in drawn for event in shown.events if event.layer >= 0})
    return {
        "data": {
            "lanes": LANES,
            "layers": layers,
            "first": 1 + layers.index(first_layer) if first_layer in layers else 0,
        },
        "figures": [
            {
                "name": f"{name} ({one.label})",
                "of": len(one.events),
                "shown": len(shown.events),
                "url": trace_url(shown),
            }
            for name, one, shown in drawn
        ],
    }


def trace_url(timeline: Timeline) -> str:
    """Return a timeline as a data URL of a gzipped Chrome trace: the page draws it, Perfetto opens it once saved."""
    text = json.dumps(timeline.perfetto(), separators=(",", ":"), allow_nan=False)
    return f"data:application/gzip;base64,{b64encode(gzip.compress(text.encode(), mtime=0)).decode()}"


def select_events(timeline: Timeline) -> Timeline:
    """Return the first events of the ranks that worked longest, shortest and between."""
    busy = dict.fromkeys(sorted({event.rank for event in timeline.events}), 0.0)
    for event in timeline.events:
        busy[event.rank] += 0.0 if event.stage.startswith("wait") else event.seconds
    ranks = list(busy)
    kept = {ranks[i] for i in choose_ranks(list(busy.values()))} if len(ranks) > MAX_RANKS else set(ranks)
    events = sorted((event for event in timeline.events if event.rank in kept), key=lambda event: event.start)
    return replace(timeline, events=tuple(events[:MAX_EVENTS]))
