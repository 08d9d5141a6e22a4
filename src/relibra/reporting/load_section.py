"""The section that shows loads before and after a plan, for any layer and any micro-batch; drawn by loads.js."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.reporting.elements import paragraph, section
from relibra.reporting.packed import data_element, packed, quantised
from relibra.reporting.sides import Side, most_gaining, times_mean
from relibra.reporting.summary import evenly_chosen

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
            "dashed line is the mean. Both sides share a scale, which ends at the 99th percentile of the busiest ranks "
            f"of {before.words}; beyond it cells are hatched.{thinned}",
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
    """Return what loads.js draws: layer ids, the end of the scale, and for each side cubes [micro-batch, layer, row].

    "first" names the layer and micro-batch (places on their axes) to begin with: those that gain most.
    """
    loads = [side.rank_load_MLR for side in (before, after)]
    end = max(2.0, float(np.quantile(times_mean(loads[0]).max(axis=-1), 0.99)))
    L, R, E = len(before.plan.layer_ids), before.plan.num_ranks, before.plan.num_experts
    largest = max(end, float(max(times_mean(load_MLR).max() for load_MLR in loads)))
    room = max(1, MAX_BYTES // (2 * L * (2 * R + E)))
    sides = []
    for side, load_MLR in zip((before, after), loads, strict=True):
        shown = evenly_chosen(len(load_MLR), room)
        sides.append(
            {
                "name": side.name,
                "micro_batches": shown,
                "ranks": packed(quantised(times_mean(load_MLR[shown]), largest, np.uint16)) | {"end": largest},
                "experts": packed(quantised(_instances_times_mean(side, shown), end)) | {"end": end},
            }
        )
    m, layer = most_gaining(before, after)
    nearest = int(np.abs(np.array(sides[0]["micro_batches"]) - m).argmin())
    return {
        "layers": before.plan.layer_ids.tolist(),
        "end": end,
        "ranks_per_node": before.plan.ranks_per_node,
        "first": [layer, nearest],
        "sides": sides,
    }


def _instances_times_mean(side: Side, shown: list[int]) -> ndarray:
    load_MLE: Int64[ndarray, "M L E"] = side.demand.load_MLE[shown]
    mean_ML1 = load_MLE.mean(axis=-1, keepdims=True)
    busiest_MLE = side.instance_load_MLE()[shown]
    return np.divide(busiest_MLE, mean_ML1, out=np.ones(load_MLE.shape), where=mean_ML1 > 0)


def _pair(axis: str, title: str, before: Side, after: Side) -> str:
    figures = "".join(
        f'<figure><figcaption>{escape(side.name)}</figcaption><canvas data-side="{i}" data-axis="{axis}" tabindex="0" '
        f'role="img" aria-label="{title}: {escape(side.name)}. Arrow keys move the cell that is read out."></canvas>'
        "</figure>"
        for i, side in enumerate((before, after))
    )
    return f'<h3>{title} <span data-title="{axis}"></span></h3><div class="pair">{figures}</div>'
