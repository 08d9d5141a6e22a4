"""The section that shows what ranks did when, simulated or measured; drawn by timeline.js."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from relibra.reporting.html.array_json import data_element, packed
from relibra.reporting.html.html import paragraph, section
from relibra.reporting.pages.load_section import slider
from relibra.timeline import Event, Timeline

MAX_RANKS = 6
MAX_EVENTS = 40_000
"""Events of one timeline: 21 bytes each on the page, and a third more as base64."""

LANES = (
    ("work", ("attention", "experts", "at home", "optimizer")),
    ("rows", ("dispatch", "combine")),
    ("copies", ("push", "return", "wait push", "wait return", "gradients")),
)
"""What runs beside each other on a rank has a line of its own; stages that nobody knows work."""


def chosen_ranks(busy_R: Sequence[float] | Sequence[int], limit: int = MAX_RANKS) -> list[int]:
    """Return the busiest and the idlest rank and some between them by load, in order of their numbers.

    >>> chosen_ranks([3, 9, 1, 4, 5], 3)
    [1, 2, 3]
    """
    order = np.argsort(-np.asarray(busy_R), kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(limit, len(order))).round().astype(int))
    return sorted(int(rank) for rank in order[places])


def timeline_section(timelines: Sequence[tuple[str, Timeline]], about: str, *, first_layer: int) -> str:
    """Show timelines below each other on one scale of time; nothing without events.

    timelines   (name, timeline); those with more than MAX_EVENTS events show the first ones
    about       which step, ranks and micro-batch they are of
    first_layer decoder layer to begin with
    """
    drawn = [(name, _thinned(timeline), timeline) for name, timeline in timelines if timeline.events]
    if not drawn:
        return ""
    layers = sorted({event.layer for _, events, _ in drawn for event in events if event.layer >= 0})
    facts = {
        "lanes": [name for name, _ in LANES],
        "layers": layers,
        "first": 1 + layers.index(first_layer) if first_layer in layers else 0,
        "timelines": [_facts(name, events, timeline) for name, events, timeline in drawn],
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
        "What ranks do when",
        paragraph(about, "how"),
        paragraph(f"Only the first {MAX_EVENTS:,} events of {' and '.join(cut)} are drawn.", "how") if cut else "",
        '<div class="explorer" id="timeline-explorer"><div class="controls">'
        + slider("timeline-layer", "Layer", len(layers))
        + slider("timeline-zoom", "Zoom", 48)
        + slider("timeline-move", "Time", 1000)
        + "</div>",
        '<ul class="legend" id="timeline-legend"></ul>',
        pictures,
        '<p class="readout" id="timeline-readout" role="status">A click on an event, or arrow keys up and down in a '
        "timeline, read it out here.</p></div>",
        data_element("timeline-data", facts),
    )


def _thinned(timeline: Timeline) -> list[Event]:
    """Keep the ranks that worked longest, shortest and between, then the first events."""
    ranks = sorted({event.rank for event in timeline.events})
    if len(ranks) > MAX_RANKS:
        busy = dict.fromkeys(ranks, 0.0)
        for event in timeline.events:
            busy[event.rank] += 0.0 if event.stage.startswith("wait") else event.seconds
        kept = {ranks[i] for i in chosen_ranks([busy[rank] for rank in ranks])}
    else:
        kept = set(ranks)
    events = sorted((event for event in timeline.events if event.rank in kept), key=lambda event: event.start)
    return events[:MAX_EVENTS]


def _facts(name: str, events: Sequence[Event], timeline: Timeline) -> dict[str, Any]:
    ranks = sorted({event.rank for event in events})
    stages = list(dict.fromkeys([stage for _, known in LANES for stage in known] + [event.stage for event in events]))
    used = {event.stage for event in events}
    stages = [stage for stage in stages if stage in used][:255]
    number = {stage: i for i, stage in enumerate(stages)}
    lane = {stage: i for i, (_, known) in enumerate(LANES) for stage in known}
    events = [event for event in events if event.stage in number]
    start = np.array([event.start for event in events], dtype=np.float64)
    return {
        "name": name,
        "label": timeline.label,
        "ranks": ranks,
        "stages": [[stage, lane.get(stage, 0)] for stage in stages],
        "start": packed(start - start.min(initial=np.inf)),
        "seconds": packed(np.array([event.seconds for event in events], dtype=np.float32)),
        "bytes": packed(np.array([event.bytes for event in events], dtype=np.float32)),
        "layer": packed(np.clip([event.layer for event in events], -1, 32767).astype(np.int16)),
        "micro_batch": packed(np.clip([event.micro_batch for event in events], -1, 32767).astype(np.int16)),
        "rank": packed(np.array([ranks.index(event.rank) for event in events], dtype=np.uint8)),
        "stage": packed(np.array([number[event.stage] for event in events], dtype=np.uint8)),
    }
