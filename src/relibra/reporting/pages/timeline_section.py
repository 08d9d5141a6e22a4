"""The section on timelines, simulated or measured: what each rank does at which time; drawn by timeline.js."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from relibra.reporting.data.step_simulation import MAX_RANKS, choose_ranks
from relibra.reporting.html.array_json import data_element, pack
from relibra.reporting.html.html import paragraph, section, slider
from relibra.timeline import Event, Timeline

MAX_EVENTS = 40_000
"""Events of one timeline: 25 bytes each on the page, and a third more as base64."""

LANES = (
    ("work", ("attention", "experts", "at home", "optimizer")),
    ("rows", ("dispatch", "dispatch in node", "combine", "combine in node")),
    ("copies", ("push", "return", "wait push", "wait return", "gradients")),
)
"""Stages that run beside each other on a rank have a lane each; unknown stages are drawn as work."""

MAX_STAGES = 255


def timeline_section(timelines: Sequence[tuple[str, Timeline]], about: str, *, first_layer: int) -> str:
    """Show timelines below each other on one scale of time; "" without events.

    timelines     (name, timeline); of one with more than MAX_EVENTS events the first ones are shown
    about         which step, ranks and micro-batch they are of
    first_layer   decoder layer to begin with
    """
    drawn = [(name, _select_events(timeline), timeline) for name, timeline in timelines if timeline.events]
    if not drawn:
        return ""
    layers = sorted({event.layer for _, events, _ in drawn for event in events if event.layer >= 0})
    facts = {
        "lanes": [name for name, _ in LANES],
        "layers": layers,
        "first": 1 + layers.index(first_layer) if first_layer in layers else 0,
        "timelines": [_pack_events(name, events, timeline.label) for name, events, timeline in drawn],
    }
    cut = [name for name, events, timeline in drawn if len(events) < len(timeline.events)]
    pictures = "".join(
        f'<figure><figcaption>{escape(name)} ({timeline.label})</figcaption><canvas data-timeline="{i}" tabindex="0" '
        f'role="img" aria-label="Timeline of {escape(name)}, {timeline.label}. Arrow keys left and right move in time, '
        'plus and minus zoom, up and down go from event to event."></canvas></figure>'
        for i, (name, _, timeline) in enumerate(drawn)
    )
    return section(
        "timeline",
        "Timeline of ranks",
        paragraph(about, "how"),
        paragraph(f"Only the first {MAX_EVENTS:,} events of {' and '.join(cut)} are drawn.", "how") if cut else "",
        '<div class="explorer" id="timeline-explorer"><div class="controls">'
        + slider("timeline-layer", "Layer", len(layers))
        + slider("timeline-zoom", "Zoom", 48)
        + slider("timeline-move", "Time", 1000)
        + "</div>",
        '<ul class="legend" id="timeline-legend"></ul>',
        pictures,
        '<p class="readout" id="timeline-readout" role="status">Click an event, or press arrow keys up and down in a '
        "timeline, to read its figures here.</p></div>",
        data_element("timeline-data", facts),
    )


def _select_events(timeline: Timeline) -> list[Event]:
    """Return the first events of the ranks that worked longest, shortest and between."""
    busy = dict.fromkeys(sorted({event.rank for event in timeline.events}), 0.0)
    for event in timeline.events:
        busy[event.rank] += 0.0 if event.stage.startswith("wait") else event.seconds
    ranks = list(busy)
    kept = {ranks[i] for i in choose_ranks(list(busy.values()))} if len(ranks) > MAX_RANKS else set(ranks)
    events = sorted((event for event in timeline.events if event.rank in kept), key=lambda event: event.start)
    return events[:MAX_EVENTS]


def _pack_events(name: str, events: Sequence[Event], label: str) -> dict[str, Any]:
    ranks = sorted({event.rank for event in events})
    lane = {stage: i for i, (_, stages) in enumerate(LANES) for stage in stages}
    used = dict.fromkeys(event.stage for event in events)
    stages = [*(stage for stage in lane if stage in used), *(stage for stage in used if stage not in lane)][:MAX_STAGES]
    number = {stage: i for i, stage in enumerate(stages)}
    events = [event for event in events if event.stage in number]
    start = np.array([event.start for event in events], dtype=np.float64)
    return {
        "name": name,
        "label": label,
        "ranks": ranks,
        "stages": [[stage, lane.get(stage, 0)] for stage in stages],
        "start": pack(start - start.min(initial=np.inf)),
        "seconds": pack(np.array([event.seconds for event in events], dtype=np.float32)),
        "bytes": pack(np.array([event.bytes for event in events], dtype=np.float32)),
        "between": pack(np.array([event.bytes_between_nodes for event in events], dtype=np.float32)),
        "layer": pack(np.clip([event.layer for event in events], -1, 32767).astype(np.int16)),
        "micro_batch": pack(np.clip([event.micro_batch for event in events], -1, 32767).astype(np.int16)),
        "rank": pack(np.array([ranks.index(event.rank) for event in events], dtype=np.uint8)),
        "stage": pack(np.array([number[event.stage] for event in events], dtype=np.uint8)),
    }
