"""Plotly figures about a step under two plans: loads of ranks and experts, and timelines of ranks."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.reporting.data.compared_plans import ComparedStep, times_mean
from relibra.reporting.data.step_simulation import MAX_RANKS, choose_ranks
from relibra.reporting.data.summary import evenly_chosen
from relibra.reporting.html.route_figures import plain_name, plotly_figures
from relibra.timeline import Event, Timeline

MAX_CELLS = 800_000
"""Cells of all heatmaps of loads together: three bytes each on the page."""
MAX_VIEWS = 200
"""Views of a heatmap: each is two traces of the figure, and a slider restyles all."""
MAX_EVENTS = 8_000
"""Events of one timeline: some 60 bytes each on the page, and an element each in a browser."""
LANES = {
    "work": ("attention", "experts", "at home", "optimizer"),
    "rows": ("dispatch", "dispatch in node", "combine", "combine in node"),
    "copies": ("push", "return", "wait push", "wait return", "gradients"),
}
"""Stages that run beside each other on a rank have a lane each; unknown stages are drawn as work."""
STYLES = {
    "attention": ("#0072b2", ""), "experts": ("#e69f00", "/"), "at home": ("#e69f00", ""),
    "optimizer": ("#cc79a7", "."), "dispatch": ("#56b4e9", ""), "dispatch in node": ("#56b4e9", "."),
    "combine": ("#009e73", "/"), "combine in node": ("#009e73", "."), "push": ("#d55e00", ""),
    "return": ("#cc79a7", "/"), "wait push": ("#8a8a8a", "-"), "wait return": ("#8a8a8a", "-"),
    "gradients": ("#f0e442", "."),
}  # fmt: skip
"""Colour and pattern of a stage."""


def load_figures(step: ComparedStep) -> dict[str, Any]:
    """Return heatmaps of the load of ranks and of experts in % of their mean, both plans side by side.

    An expert with replicas has the load of its busiest instance. Colours end at the 99th percentile of the largest
    load of each micro-batch and layer, at least at 200 %.

    returns   "layers", "micro_batches": (title, figure) of ranks and of experts, a view per layer and per micro-batch;
              "layer_ids", "numbers": what these views show; "first": positions of the most improved of both
    """
    layer_ids, (before, after) = step.before.plan.layer_ids.tolist(), step.plans
    sizes = step.before.plan.num_ranks + step.before.plan.num_experts
    room = max(1, min(MAX_VIEWS, MAX_CELLS // (4 * len(layer_ids) * sizes)))
    lengths = [len(plan.plan.replica_MLRB) for plan in step.plans]
    numbers = evenly_chosen(max(lengths), room)
    shown = [[number for number in numbers if number < length] for length in lengths]
    cubes = {
        "ranks": [times_mean(plan.rank_load_MLR) for plan in step.plans],
        "experts": [times_mean(plan.demand.load_MLE, of=plan.instance_load_MLE()) for plan in step.plans],
    }
    names, (m, layer) = (before.name, after.name), step.most_improved()
    of_layers, of_micro_batches = [], []
    for rows, pair in cubes.items():
        end = 100 * max(2.0, *(float(np.quantile(cube.max(axis=-1), 0.99)) for cube in pair))
        kept = [cube[own] for cube, own in zip(pair, shown, strict=True)]
        views: list[list[Any]] = [[cube[:, i] for cube in kept] for i in range(len(layer_ids))]
        of_layers.append((rows, _heatmaps(views, shown, names, ("micro-batch", rows[:-1]), end)))
        views = [
            [cube[number] if number < length else None for cube, length in zip(pair, lengths, strict=True)]
            for number in numbers
        ]
        of_micro_batches.append((rows, _heatmaps(views, [layer_ids] * 2, names, ("layer", rows[:-1]), end)))
    return {
        "layers": of_layers,
        "micro_batches": of_micro_batches,
        "layer_ids": layer_ids,
        "numbers": numbers,
        "first": (layer, int(np.abs(np.array(numbers) - m).argmin())),
    }


def _heatmaps(
    views: Sequence[Sequence[Float64[ndarray, "_ _"] | None]],
    columns: Sequence[Sequence[int]],
    names: Sequence[str],
    axes: tuple[str, str],
    end: float,
) -> Any:
    """Draw two heatmaps side by side for each view, all hidden until the page shows one; None: no such micro-batch."""
    figure = plotly_figures().Figure()
    for view in views:
        for i, loads_XY in enumerate(view):
            suffix = "" if i == 0 else "2"
            figure.add_heatmap(
                z=[] if loads_XY is None else np.rint(100 * np.minimum(loads_XY, 650)).T.astype(np.uint16),
                x=[str(number) for number in columns[i]],
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                visible=False,
                zmin=0,
                zmax=end,
                colorscale="Cividis",
                showscale=i == 1,
                hovertemplate=f"{axes[0]} %{{x}}, {axes[1]} %{{y}}: %{{z:,}} % of the mean<extra></extra>",
            )
    for i, name in enumerate(names):
        suffix, domain = ("", [0.0, 0.48]) if i == 0 else ("2", [0.52, 1.0])
        title = {"text": f"{axes[0]}<br>{plain_name(name)}"}
        figure.update_layout({f"xaxis{suffix}": {"title": title, "domain": domain, "type": "category"}})
    rows = next(loads_XY.shape[1] for loads_XY in views[0] if loads_XY is not None)
    height = int(np.clip(170 + 9 * rows, 260, 620))
    ticks = {"title": {"text": axes[1]}, "dtick": 1 if rows <= 8 else None}
    figure.update_layout(height=height, yaxis=ticks, yaxis2={"anchor": "x2", "matches": "y", "showticklabels": False})
    return figure


def timeline_values(timelines: Sequence[tuple[str, Timeline]], first_layer: int) -> dict[str, Any] | None:
    """Return timelines drawn one below the other, and their files; None without events.

    timelines     (name, timeline); of one with more than MAX_EVENTS events the first ones are shown
    first_layer   decoder layer to begin with
    """
    kept = [(name, item, select_events(item)) for name, item in timelines if item.events]
    if not kept:
        return None
    names = [f"{name} ({item.label})" for name, item, _ in kept]
    drawn = [[event._replace(start=event.start - part.events[0].start) for event in part.events] for _, _, part in kept]
    layers = sorted({event.layer for events in drawn for event in events if event.layer >= 0})
    return {
        "figure": _timelines_figure(names, drawn),
        "layers": layers,
        "views": [_time_ranges(drawn, layer) for layer in (None, *layers)],
        "first": 1 + layers.index(first_layer) if first_layer in layers else 0,
        "files": [
            {"name": name, "of": len(item.events), "shown": len(events), "url": trace_url(part)}
            for name, (_, item, part), events in zip(names, kept, drawn, strict=True)
        ],
    }


def trace_url(timeline: Timeline) -> str:
    """Return a timeline as a data URL of a gzipped Chrome trace, which Perfetto opens once it is saved."""
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


def _timelines_figure(names: Sequence[str], drawn: Sequence[Sequence[Event]]) -> Any:
    """Draw a row of lanes for each rank of each timeline; events of a stage share a colour and a pattern."""
    figure, lanes, legend = plotly_figures().Figure(), list(LANES.values()), set[str]()
    height = 1 / len(drawn)
    for i, events in enumerate(drawn):
        suffix = "" if i == 0 else str(i + 1)
        ranks = sorted({event.rank for event in events})
        for stage in dict.fromkeys(event.stage for event in events):
            own = [event for event in events if event.stage == stage]
            lane = next((number for number, stages in enumerate(lanes) if stage in stages), 0)
            colour, pattern = STYLES.get(stage, ("#999999", "-" if stage.startswith("wait") else ""))
            figure.add_bar(
                orientation="h",
                base=[float(f"{event.start:.6g}") for event in own],  # text even from an array: each digit is a byte
                x=np.array([event.seconds for event in own], dtype=np.float32),
                y=np.array([ranks.index(event.rank) + (lane - 1) * 0.3 for event in own], dtype=np.float32),
                width=0.27,
                xaxis=f"x{suffix}",
                yaxis=f"y{suffix}",
                name=plain_name(stage),
                legendgroup=stage,
                showlegend=stage not in legend,
                marker={"color": colour, "pattern": {"shape": pattern, "size": 5}},
                customdata=[
                    (e.rank, e.layer, e.micro_batch, float(f"{e.seconds:.3g}"), e.bytes, e.bytes_between_nodes)
                    for e in own
                ],
                hovertemplate=(
                    f"rank %{{customdata[0]}}: {plain_name(stage)}, layer %{{customdata[1]}}, "
                    "micro-batch %{customdata[2]}<br>%{customdata[3]:.3s}s from %{base:.3s}s on<br>"
                    "%{customdata[4]:.3s}B, %{customdata[5]:.3s}B of them to other nodes<extra></extra>"
                ),
            )
            legend.add(stage)
        ticks = {"tickvals": list(range(len(ranks))), "ticktext": [f"rank {rank}" for rank in ranks]}
        bottom = 1 - (i + 1) * height
        figure.update_layout({
            f"yaxis{suffix}": {"domain": [bottom + 0.2 * height, bottom + height], "autorange": "reversed", **ticks},
            f"xaxis{suffix}": {"anchor": f"y{suffix}", "title": {"text": f"seconds, {plain_name(names[i])}"}},
        })  # fmt: skip
    rows = sum(len({event.rank for event in events}) for events in drawn)
    figure.update_layout(height=140 + 110 * len(drawn) + 44 * rows, barmode="overlay", bargap=0)
    return figure


def _time_ranges(drawn: Sequence[Sequence[Event]], layer: int | None) -> dict[str, list[float]]:
    """Return the range of each time axis, all equally long: from a layer's first event to the end of its first combine.

    layer   None: all layers
    """
    starts, lengths = [], []
    for events in drawn:
        own = [event for event in events if layer is None or event.layer == layer] or events
        ends = [event.start + event.seconds for event in own if layer is None or event.stage == "combine"]
        starts.append(own[0].start)
        lengths.append((max(ends) if layer is None else min(ends, default=own[0].start)) - own[0].start)
    longest = max(lengths) or 1e-6
    return {
        f"xaxis{i or ''}.range": [start - 0.04 * longest, start + 1.04 * longest]
        for i, start in zip([0, *range(2, len(drawn) + 1)], starts, strict=True)
    }
