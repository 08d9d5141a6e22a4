"""`COLUMNS`: figures of a balancer's plan as text, for the table of `relibra compare` and that of a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from relibra.planning.costs.step_bytes import StepBytes
from relibra.reporting.data.comparison import ComparisonRow
from relibra.reporting.data.number_format import gigabytes


class Column(NamedTuple):
    """One column of the table: its name, the text of a row that has a plan, and its meaning for the legend."""

    name: str
    cell: Callable[[ComparisonRow], str]
    meaning: str


def _bytes(row: ComparisonRow) -> StepBytes:
    assert row.bytes is not None, "measured"
    return row.bytes


_SKEW = "busiest ranks / mean ranks in token-slots, summed over micro-batches and layers"
_BOUND = "the lowest skew with the homes, slots, schedule and scope of copies of this row"
_ANY_HOMES = "the bound with the best homes for each micro-batch and layer"
_PUSHED = "weights sent to replicas before forward and again before backward"
_OPEN = "modelled seconds of copies that nothing hides"
_ACROSS = "token-slots computed on another node than their token"
_SLOTS = "memory of a rank's spare slots with gradients"
_BETWEEN = "sent between nodes: at least these rows, gate weights, weights, gradients, and all moves"
_SCOPE = "where copies may be: on the node of their home, or in the cluster; bounds compare only within one"
_SECONDS = "modelled time of attention and experts, from a lower bound of the rows that travel; not measured"

COLUMNS = (
    Column("skew", lambda row: f"{row.skew:.3f}", _SKEW),
    Column("step s model", lambda row: f"{row.predicted_seconds:.3g}", _SECONDS),
    Column("copies", lambda row: f"{row.copies_per_micro_batch_layer:.1f}", "per micro-batch and layer"),
    Column("pushed GB", lambda row: gigabytes(_bytes(row).weights.total), _PUSHED),
    Column("across nodes", lambda row: f"{row.cross_node_share:.1%}", _ACROSS),
    Column("open s model", lambda row: f"{row.exposed_seconds:.2g}", _OPEN),
    Column("slots GB", lambda row: gigabytes(row.slot_bytes or 0), _SLOTS),
    Column("plan s", lambda row: f"{row.plan_seconds:.2f}", "measured here"),
    Column("bound", lambda row: f"{row.bound:.3f}", _BOUND),
    Column("gap", lambda row: f"{row.gap:.1%}", "skew / bound - 1"),
    Column("moved GB", lambda row: gigabytes(_bytes(row).moves.total), "state of experts with a new home"),
    Column("slots used", lambda row: f"{row.slots_used}/{row.slots}", "most filled on a rank / reserved"),
    Column("any homes", lambda row: f"{row.bound_any_homes:.3f}", _ANY_HOMES),
    Column("between GB", lambda row: gigabytes(sum(links.between for links in _bytes(row))), _BETWEEN),
    Column("moves s", lambda row: f"{row.relocation_seconds:.2g}", "part of step s for moves of experts"),
    Column("copies within", lambda row: row.scope or "-", _SCOPE),
)
"""The most important ones first: a narrow terminal has no room for the last."""
