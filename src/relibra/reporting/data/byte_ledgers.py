"""Byte ledgers of a compared step: what the forward dispatch of each plan sends, beside what the links can carry."""

from __future__ import annotations

from typing import NamedTuple

from relibra.reporting.data.byte_ledger import ByteLedger, byte_ledger
from relibra.reporting.data.compared_plans import ComparedStep


class NamedLedger(NamedTuple):
    """A ledger per layer and in total, with its name on the page."""

    name: str
    by_layer: ByteLedger
    total: ByteLedger


def byte_ledgers(step: ComparedStep) -> list[NamedLedger]:
    """Return the ledger of each plan as executed (a token goes to a rank once), and the second plan's per choice.

    If it is not known which experts tokens choose together, both ledgers count a row per choice; there is no third.
    """
    known = step.shared_choices_known
    (before, after) = step.plans_with_rows
    found = []
    for (one, rows), once in [(before, known), (after, known)] + [(after, False)] * known:
        ledger = byte_ledger(
            one.plan, one.demand, step.cluster, step.model.expert.row_bytes, distinct=rows, send_once=once
        )
        name = f"{one.name}, per choice" if known and not once else one.name
        found.append(NamedLedger(name, ledger, ledger.total()))
    return found
