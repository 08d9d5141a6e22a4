"""`relibra compare`: every balancer on the same step, in one table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from relibra.cli.inputs import options
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.inputs.requests import PlanningRequest, takes
from relibra.cli.inputs.workload import budget_for, open_workload
from relibra.cli.outputs.files import check_outputs, input_files, named
from relibra.cli.outputs.plan_page import check_page, write_page
from relibra.cli.outputs.terminal import print_note, print_result, print_text, progress, stdout_console
from relibra.errors import PlanError

if TYPE_CHECKING:
    from relibra.planning.plan import StepPlan
    from relibra.reporting.data.comparison import ComparisonRow
    from relibra.reporting.data.comparison_columns import Column


@dataclass(frozen=True, kw_only=True)
class CompareRequest(PlanningRequest):
    """Balancers to compare, and what they minimise."""

    take: options.TakenPart = None
    balancer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="Only these: a comma-separated list; may be repeated. Default: all."),
    ] = None

    def balancers(self) -> list[str]:
        """Return the names, each once; when none is given, all."""
        from relibra.planning.registry import BALANCERS

        names = [name.strip() for names in self.balancer or [] for name in names.split(",")]
        return list(dict.fromkeys(names)) or list(BALANCERS)


@takes(CompareRequest)
def compare(request: CompareRequest) -> None:
    """Plan one step with every balancer; print skew, bound, copies, volumes and times side by side.

    Seconds of balancers that see live loads include their counts, solver and pushes after the router.

    Example: relibra compare runs/demo --ranks 4 --micro-batch-tokens 64
    """
    from relibra.planning.registry import find_balancer
    from relibra.reporting.data.comparison import iterate_comparison

    recording = find_recording(request.source)
    check_outputs(named("--html", request.html), input_files(recording.trace, request.cluster, request.schedule))
    check_page(request.html)
    names = request.balancers()
    for name in names:
        find_balancer(name)  # an unknown name fails before the trace is read
    with progress(f"cutting {recording.trace}"):
        workload = open_workload(recording, request)
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
    from relibra.reporting.data.comparison_columns import COLUMNS

    console, shown = stdout_console(), list(COLUMNS)
    while _needs_more_than(console, table := _table(rows, shown)) and any(column.spare for column in shown):
        shown.remove(max(shown, key=lambda column: column.spare))
    console.print(table)
    for column in shown:
        print_text(f"{column.name}: {column.meaning}")
    if hidden := [column.name for column in COLUMNS if column not in shown]:
        print_text(f"no room for {', '.join(hidden)} (--json has all)")
    for row in rows:
        if row.message:
            print_note(f"{row.balancer}: {row.message}")


def _needs_more_than(console: Console, table: Table) -> bool:
    return console.measure(table, options=console.options.update(width=1000)).maximum > console.width


def _table(rows: list[ComparisonRow], columns: list[Column]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("balancer", no_wrap=True, min_width=max(len(row.balancer) for row in rows))
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    for row in rows:
        cells = ["-" if row.skew is None else column.cell(row) for column in columns]
        table.add_row(row.balancer, *cells, "yes" if row.valid else "no")
    return table
