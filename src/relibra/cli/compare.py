"""`relibra compare`: every balancer on the same step, in one table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import PlanningRequest, takes
from relibra.cli.inputs.workload import budget_for, open_request
from relibra.cli.outputs.files import named
from relibra.cli.outputs.plan_page import check_page, write_page
from relibra.cli.outputs.terminal import print_note, print_result, print_table, print_text, progress
from relibra.errors import PlanError

if TYPE_CHECKING:
    from relibra.planning.plan import StepPlan
    from relibra.reporting.data.comparison import ComparisonRow


@dataclass(frozen=True, kw_only=True)
class CompareRequest(PlanningRequest):
    """Balancers to compare.

    balancer NAME,...  Only these: a comma-separated list; may be repeated. Default: all.
    """

    take: options.TakenPart = None
    balancer: list[str] | None = None

    def balancers(self) -> list[str]:
        """Return the names, each once; when none is given, all."""
        from relibra.planning.registry import BALANCERS

        names = [name.strip() for names in self.balancer or [] for name in names.split(",")]
        return list(dict.fromkeys(names)) or list(BALANCERS)


@takes(CompareRequest)
def compare(request: CompareRequest) -> None:
    """Plan one step with every balancer; print skew, bound, copies, volumes and times side by side.

    Seconds of balancers that see live loads include what follows the router: exchange of counts, solver, pushes.

    Example: relibra compare runs/demo --ranks 4 --micro-batch-tokens 64
    """
    from relibra.planning.registry import find_balancer
    from relibra.reporting.data.comparison import iterate_comparison

    check_page(request.html)
    names = request.balancers()
    for name in names:
        find_balancer(name)  # an unknown name fails before the trace is read
    workload = open_request(request, named("--html", request.html))
    workload.note_problems(*names)
    machine, demand, budget = workload.machine, workload.demand, budget_for(request, workload)
    found = []
    plans = iterate_comparison(
        demand, machine, budget, names, expert=workload.model.expert, history_MLE=workload.history_MLE
    )
    for number, name in enumerate(names):
        with progress(f"planning with {name} ({number + 1} of {len(names)}; the first run compiles kernels)"):
            found.append(next(plans))
    rows = [row for row, _ in found]
    if all(plan is None for _, plan in found):
        raise PlanError(rows[0].message)  # no balancer has a plan: the request is at fault
    if request.html is not None:
        if shown := _plan_to_draw(found):
            name, plan = shown
            write_page(request.html, plan, workload, rows, name=f"the plan of {name}")
        else:
            print_note("no page: no balancer made a valid plan")
    if request.as_json:
        typer.echo(json.dumps([row.figures() for row in rows]))
        return
    print_result(workload.facts(), as_json=False)
    print_comparison(rows)


def _plan_to_draw(found: list[tuple[ComparisonRow, StepPlan | None]]) -> tuple[str, StepPlan] | None:
    """Return name and plan of the cheapest of relibra's valid plans, else of all valid plans."""
    valid = [(row, plan) for row, plan in found if plan is not None and row.valid]
    own = [pair for pair in valid if pair[0].balancer.startswith("relibra")]
    if not valid:
        return None
    row, plan = min(own or valid, key=lambda pair: pair[0].predicted_seconds or 0.0)
    return row.balancer, plan


def print_comparison(rows: list[ComparisonRow]) -> None:
    """Print the rows as a table that fits the terminal, its legend, and the errors of balancers without a plan."""
    from relibra.reporting.data.comparison import COLUMNS

    cells = [{column.name: column.cell(row) for column in COLUMNS} if row.skew is not None else {} for row in rows]
    table = [{"balancer": row.balancer, "ok": row.valid, **own} for row, own in zip(rows, cells, strict=True)]
    shown = print_table(table, ("balancer", "ok", *(column.name for column in COLUMNS)))
    for column in COLUMNS:
        if column.name in shown:
            print_text(f"{column.name}: {column.meaning}")
    for row in rows:
        if row.message:
            print_note(f"{row.balancer}: {row.message}")
