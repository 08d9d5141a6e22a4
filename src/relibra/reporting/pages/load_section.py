"""The section that shows loads before and after a plan, for any layer and any micro-batch; drawn by loads.js."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.reporting.data.compared_plans import Side, most_gaining, times_mean
from relibra.reporting.data.summary import evenly_chosen
from relibra.reporting.html.array_json import data_element, packed, quantised
from relibra.reporting.html.html import paragraph, section

MAX_BYTES = 3_000_000
"""Of all pictures together, a third more as base64: two for a rank in a micro-batch and layer, one for an expert."""


def load_section(before: Side, after: Side) -> str:
    """Show the load of ranks and experts on both sides; nothing for a step without load."""
    if not before.demand.load_MLE.any() or not after.demand.load_MLE.any():
        return ""
    facts = load_facts(before, after)
    shown = max(len(side["micro_batches"]) for side in facts["sides"])
    micro_batches = max(len(side.plan.replica_MLRB) for side in (before, after))
    thinned = f" {shown} of {micro_batches:,} micro-batches are shown, evenly chosen." * (shown < micro_batches)
    first_layer, first_m = facts["first"]
    return section(
        "loads",
        "Load of every rank and expert",
        paragraph(
            "Colour: token-slots / mean over ranks (or experts) in the same layer and micro-batch; 1 is an equal "
            "share. An expert with replicas shows its busiest instance. Bars above: the busiest of the column; the "
            "dashed line is the mean. Both sides share a scale, one for ranks and one for experts: it ends at the 99th "
            f"percentile of the busiest, of the side where that is larger. Beyond it cells are hatched.{thinned}",
            "how",
        ),
        '<div class="explorer" id="load-explorer">',
        '<div class="controls">'
        '<label>Rows <select id="load-rows"><option value="ranks">ranks</option>'
        '<option value="experts">experts</option></select></label>'
        + slider("load-layer", "Layer", len(before.plan.layer_ids) - 1, first_layer)
        + slider("load-micro-batch", "Micro-batch", shown - 1, first_m)
        + "</div>",
        '<p class="readout" id="load-readout" role="status"></p>',
        *(
            _pair(axis, title, before, after)
            for axis, title in (("m", "All micro-batches of layer"), ("l", "All layers of micro-batch"))
        ),
        '<div class="scale" id="load-scale" aria-hidden="true"><canvas></canvas><div></div></div>',
        '<p class="how" id="load-beyond"></p>',
        "</div>",
        data_element("load-data", facts),
    )


def slider(identifier: str, label: str, last: int, value: int = 0) -> str:
    """Return a labelled slider, which arrow keys move by one; its output is filled by a script."""
    ends = f'min="0" max="{max(0, last)}" value="{value}"'
    return (
        f'<label class="slider">{label} <output id="{identifier}-value" for="{identifier}"></output>'
        f'<input type="range" id="{identifier}" {ends} autocomplete="off"></label>'
    )


def load_facts(before: Side, after: Side) -> dict[str, Any]:
    """Return what loads.js draws: layer ids, ends of the scales, and for each side cubes [micro-batch, layer, row].

    "scales" says for ranks and experts where colours end and what the largest load is, both / mean. "first" names the
    layer and micro-batch (places on their axes) to begin with: those that gain most.
    """
    L, R, E = len(before.plan.layer_ids), before.plan.num_ranks, before.plan.num_experts
    room = max(1, MAX_BYTES // (2 * L * (2 * R + E)))
    shown = [evenly_chosen(len(side.plan.replica_MLRB), room) for side in (before, after)]
    scales: dict[str, dict[str, float]] = {}
    cubes: dict[str, list[dict[str, Any]]] = {}
    for rows, times in (("ranks", _ranks_times_mean), ("experts", _instances_times_mean)):
        values = [times(side) for side in (before, after)]
        end = max(2.0, *(float(np.quantile(value.max(axis=-1), 0.99)) for value in values))
        largest = max(float(value.max()) for value in values)
        scales[rows] = {"end": end, "largest": largest}
        cubes[rows] = [_cube(value[chosen], largest, rows) for value, chosen in zip(values, shown, strict=True)]
    m, layer = most_gaining(before, after)
    nearest = int(np.abs(np.array(shown[0]) - m).argmin())
    return {
        "layers": before.plan.layer_ids.tolist(),
        "scales": scales,
        "ranks_per_node": before.plan.ranks_per_node,
        "first": [layer, nearest],
        "sides": [
            {"name": side.name, "micro_batches": shown[i], "ranks": cubes["ranks"][i], "experts": cubes["experts"][i]}
            for i, side in enumerate((before, after))
        ],
    }


def _cube(times: ndarray, largest: float, rows: str) -> dict[str, Any]:
    """Pack loads / mean [M, L, rows], and the busiest of each column, which is read out.

    Experts are many, so one takes a byte, with finer steps for small loads: that of its square root.
    """
    packed_times = quantised(times, largest, np.uint16) if rows == "ranks" else quantised(np.sqrt(times / largest), 1.0)
    return packed(packed_times) | {
        "end": largest,
        "power": 1 if rows == "ranks" else 2,
        "busiest": packed(quantised(times.max(axis=-1), largest, np.uint16)),
    }


def _ranks_times_mean(side: Side) -> ndarray:
    return times_mean(side.rank_load_MLR)


def _instances_times_mean(side: Side) -> ndarray:
    load_MLE: Int64[ndarray, "M L E"] = side.demand.load_MLE
    mean_ML1 = load_MLE.mean(axis=-1, keepdims=True)
    return np.divide(side.instance_load_MLE(), mean_ML1, out=np.ones(load_MLE.shape), where=mean_ML1 > 0)


def _pair(axis: str, title: str, before: Side, after: Side) -> str:
    figures = "".join(
        f'<figure><figcaption>{escape(side.name)}</figcaption><canvas data-side="{i}" data-axis="{axis}" tabindex="0" '
        f'role="img" aria-label="{title}: {escape(side.name)}. Arrow keys move the cell that is read out."></canvas>'
        "</figure>"
        for i, side in enumerate((before, after))
    )
    return f'<h3>{title} <span data-title="{axis}"></span></h3><div class="pair">{figures}</div>'
