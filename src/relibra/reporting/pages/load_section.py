"""The section on loads before and after a plan, for any layer and any micro-batch; drawn by loads.js."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.load_cubes import expert_cubes, rank_cubes
from relibra.reporting.data.summary import evenly_chosen
from relibra.reporting.html.array_json import data_element, pack, quantise
from relibra.reporting.html.html import paragraph, section, slider

MAX_BYTES = 3_000_000
"""Limit for all pictures before base64: 2 bytes per rank and 1 per expert, for each micro-batch and layer."""


def load_section(step: ComparedStep) -> str:
    """Return the loads of ranks and experts under both plans; "" for a step without load."""
    if not all(one.demand.load_MLE.any() for one in step.plans):
        return ""
    facts = load_facts(step)
    shown = max(len(one["micro_batches"]) for one in facts["plans"])
    micro_batches = max(len(one.plan.replica_MLRB) for one in step.plans)
    thinned = f" {shown} of {micro_batches:,} micro-batches are shown, evenly chosen." * (shown < micro_batches)
    first_layer, first_m = facts["first"]
    return section(
        "loads",
        "Load of every rank and expert under both plans",
        paragraph(
            "Colour: token-slots (one for each token and each expert that it chose) / mean over the ranks or experts "
            "of the same layer and micro-batch; 1 is an equal share. Bars above: the busiest of the column; the dashed "
            "line is the mean. An expert with replicas (temporary copies on other ranks) shows its busiest instance. "
            "Both pictures share a colour scale, which ends at the 99th percentile of the busiest; larger loads are "
            f"hatched.{thinned}",
            "how",
        ),
        '<div class="explorer" id="load-explorer">',
        '<div class="controls">'
        '<label>Rows <select id="load-rows"><option value="ranks">ranks</option>'
        '<option value="experts">experts</option></select></label>'
        + slider("load-layer", "Layer", len(step.before.plan.layer_ids) - 1, first_layer)
        + slider("load-micro-batch", "Micro-batch", shown - 1, first_m)
        + "</div>",
        '<p class="readout" id="load-readout" role="status"></p>',
        _pair("m", "All micro-batches of layer", step),
        _pair("l", "All layers of micro-batch", step),
        '<div class="scale" id="load-scale" aria-hidden="true"><canvas></canvas><div></div></div>',
        '<p class="how" id="load-beyond"></p>',
        "</div>",
        data_element("load-data", facts),
    )


def load_facts(step: ComparedStep) -> dict[str, Any]:
    """Return what loads.js draws: layer ids, scales, and for each plan cubes [micro-batch, layer, row].

    "scales" holds, for ranks and for experts, where colours end and the largest load, both / mean. "first" holds the
    indices of the layer and the micro-batch to begin with: the most improved ones.
    """
    L, R, E = len(step.before.plan.layer_ids), step.before.plan.num_ranks, step.before.plan.num_experts
    room = max(1, MAX_BYTES // (2 * L * (2 * R + E)))
    shown = [evenly_chosen(len(one.plan.replica_MLRB), room) for one in step.plans]
    cubes = {"ranks": rank_cubes(step), "experts": expert_cubes(step)}
    m, layer = step.most_improved()
    return {
        "layers": step.before.plan.layer_ids.tolist(),
        "scales": {rows: {"end": found.end, "largest": found.largest} for rows, found in cubes.items()},
        "ranks_per_node": step.before.plan.ranks_per_node,
        "first": [layer, int(np.abs(np.array(shown[0]) - m).argmin())],
        "plans": [
            {
                "name": one.name,
                "micro_batches": shown[i],
                **{rows: _pack_cube(found.plans[i][shown[i]], found.largest, rows) for rows, found in cubes.items()},
            }
            for i, one in enumerate(step.plans)
        ],
    }


def _pack_cube(times: ndarray, largest: float, rows: str) -> dict[str, Any]:
    """Pack loads / mean [M, L, rows], and the busiest of each column, which is read out.

    Experts are many, so each takes a byte, the square root of its load: finer steps for small loads.
    """
    packed = quantise(times, largest, np.uint16) if rows == "ranks" else quantise(np.sqrt(times / largest), 1.0)
    return pack(packed) | {
        "end": largest,
        "power": 1 if rows == "ranks" else 2,
        "busiest": pack(quantise(times.max(axis=-1), largest, np.uint16)),
    }


def _pair(axis: str, title: str, step: ComparedStep) -> str:
    figures = "".join(
        f'<figure><figcaption>{escape(one.name)}</figcaption><canvas data-plan="{i}" data-axis="{axis}" tabindex="0" '
        f'role="img" aria-label="{title}: {escape(one.name)}. Arrow keys move the cell that is read out."></canvas>'
        "</figure>"
        for i, one in enumerate(step.plans)
    )
    return f'<h3>{title} <span data-title="{axis}"></span></h3><div class="pair">{figures}</div>'
