"""The section on the bytes that ranks exchange: how much of the links' capacity carries new data."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from relibra.reporting.data.byte_ledgers import NamedLedger, byte_ledgers
from relibra.reporting.data.compared_plans import ComparedStep
from relibra.reporting.data.number_format import count, percent
from relibra.reporting.data.step_simulation import StepSimulation
from relibra.reporting.html.html import paragraph, section, table
from relibra.reporting.html.svg_lines import line_legend, line_panel

FACTORS = (
    ("efficiency_L", "efficiency", "useful / capacity"),
    ("data_factor_L", "data factor", "useful / received"),
    ("routing_factor_L", "routing factor", "received / sent by all ports"),
    ("port_factor_L", "port factor", "sent by all ports / capacity"),
)

SEND_ONCE_FACTORS = tuple(factor for factor in FACTORS if factor[1] in ("routing factor", "port factor"))
"""Factors that can be below 1 where each token goes to a rank once."""


def ledger_section(step: ComparedStep, found: StepSimulation | None) -> str:
    """Show bytes by kind, then the ledger of dispatches, in total and per layer; "" on one rank.

    found    the simulated step, for its bytes
    """
    ledgers = byte_ledgers(step)
    if not any(one.total.useful_L.any() for one in ledgers):
        return ""
    known = step.shared_choices_known
    names = [one.name for one in ledgers]
    layer_ids = step.after.plan.layer_ids
    panels = "".join(
        line_panel(f"{title}: {what}", layer_ids.tolist(), [(one.name, getattr(one.by_layer, key)) for one in ledgers])
        for key, title, what in FACTORS
        if known or title != "data factor"
    )
    return section(
        "bytes",
        "Bytes between ranks",
        _kinds_table(step, found) if found else "",
        paragraph(_method(ledgers, step), "how"),
        table("Byte ledger", ("all layers together", *names), _total_rows(ledgers), text_columns=(0,)),
        line_legend(names),
        f'<div class="panels">{panels}</div>',
        _layer_table(ledgers, layer_ids),
    )


def _kinds_table(step: ComparedStep, found: StepSimulation) -> str:
    """Return the bytes of the whole step: forward and backward, copies of experts, and all moves."""
    sent = [one.bytes.as_dict() for one in (found.before, found.after)]
    links = ("inside", "between") if step.cluster.num_nodes > 1 else ("inside",)
    rows = [
        [f"{kind}, {link} nodes", *(_gigabytes(one[kind][link]) for one in sent)]
        for link in links
        for kind in sent[0]
        if any(one[kind][link] for one in sent)
    ]
    header = ("GB in a step", *(one.name for one in step.plans))
    return table("Bytes by kind", header, rows, text_columns=(0,))


def _method(ledgers: Sequence[NamedLedger], step: ComparedStep) -> str:
    cluster = step.cluster
    if all(one.by_layer.exact for one in ledgers):
        counted = "counted token by token."
    elif step.shared_choices_known:
        counted = "a lower bound from counts of experts that tokens choose together."
    else:
        counted = "every row, because it was not counted which experts tokens choose together."
    return (
        "Forward dispatch, over all micro-batches; combine and backward send over the same links. A token goes to a "
        "rank once, as the executor sends it, and with hierarchical dispatch to a node once; in a column “per choice” "
        "every choice is a row. Useful: the first row of a token that a rank receives. Duplicate: further rows of it. "
        "Forwarded: rows that pass through a rank, because between nodes a row enters at the rank of the same number "
        "in the node. Capacity: what all ports could send until the busiest is done, at the link rates of "
        f"{cluster.name} ({cluster.label}). Efficiency = data × routing × port factor (arXiv 2604.14690): what is lost "
        "to duplicates, to rows that pass through, and to ports that wait for busier ranks or slower links. Useful "
        f"rows are {counted}"
    )


def _total_rows(ledgers: Sequence[NamedLedger]) -> list[list[str]]:
    sizes = (("useful_L", "useful, GB"), ("duplicate_L", "duplicate, GB"), ("forwarded_L", "forwarded, GB"))
    return [
        *([name, *(_gigabytes(_total(one, key)) for one in ledgers)] for key, name in sizes),
        *([f"{name}: {what}", *(percent(_total(one, key)) for one in ledgers)] for key, name, what in FACTORS),
    ]


def _total(one: NamedLedger, key: str) -> float:
    return float(getattr(one.total, key)[0])


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e12 else count(round(size / 1e9))


def _layer_table(ledgers: Sequence[NamedLedger], layer_ids: np.ndarray) -> str:
    first, second = ledgers[:2]
    factors = (FACTORS[0], *SEND_ONCE_FACTORS)

    def change(key: str, layer: int) -> str:
        return " → ".join(f"{100 * getattr(one.by_layer, key)[layer]:.0f}" for one in (first, second))

    rows = [[str(layer), *(change(key, i) for key, _, _ in factors)] for i, layer in enumerate(layer_ids.tolist())]
    header = ("layer", *(f"{name.removesuffix(' factor')} %" for _, name, _ in factors))
    figures = table("Factors per layer", header, rows, text_columns=())
    summary = f"Figures of each layer, {escape(first.name)} → {escape(second.name)}"
    return f"<details><summary>{summary}</summary>{figures}</details>"
