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
from relibra.cli.inputs.workload import budget_for, describe_budget, open_workload, workload_in_words
from relibra.cli.outputs.files import check_outputs, input_files, named
from relibra.cli.outputs.plan_page import write_page
from relibra.cli.outputs.simulated_step import moves_in_words
from relibra.cli.outputs.terminal import new_table, print_note, print_wrapped, progress, stdout_console
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

    Example: relibra compare runs/demo --ranks 4 --micro-batch-tokens 64
    """
    from relibra.planning.registry import find_balancer
    from relibra.reporting.data.comparison import iterate_comparison

    recording = find_recording(request.source)
    check_outputs(named("--html", request.html), input_files(recording.trace, request.cluster, request.schedule))
    names = request.balancers()
    for name in names:
        find_balancer(name)  # an unknown name fails before the trace is read
    with progress(f"cutting {recording.trace}"):
        workload = open_workload(recording, request)
    if workload.history_MLE is None:
        print_note(
            "no history: balancers that see only earlier loads plan from even loads; --take second-half gives one"
        )
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
    print_wrapped(
        *workload_in_words(workload), f"allowed: {describe_budget(budget)}; expert sizes of {workload.model.name}"
    )
    print_comparison(rows)
    print_wrapped(moves_in_words(request.steps))


def _plan_to_draw(found: list[tuple[ComparisonRow, StepPlan | None]]) -> tuple[str, StepPlan] | None:
    """Return name and plan of the cheapest of relibra's valid plans, else of all valid plans."""
    valid = [(row, plan) for row, plan in found if plan is not None and row.valid]
    own = [pair for pair in valid if pair[0].balancer.startswith("relibra")]
    if not valid:
        return None
    row, plan = min(own or valid, key=lambda pair: pair[0].predicted_seconds or 0.0)
    return row.balancer, plan


LIVE_WORDS = "step s of live balancers includes counts, solver and pushes after the router"


def print_comparison(rows: list[ComparisonRow]) -> None:
    """Print the rows as a table that fits the terminal, a legend, and the errors of balancers without a valid plan."""
    from relibra.reporting.data.comparison import describe_scopes
    from relibra.reporting.data.comparison_columns import COLUMNS

    console = stdout_console()
    shown, table = _fitting(rows, console)
    console.print(table)
    console.print("\n" + "; ".join(f"{column.name}: {column.meaning}" for column in shown), highlight=False)
    if any(row.sees == "live" for row in rows):
        console.print(f"{LIVE_WORDS}: {', '.join(row.balancer for row in rows if row.sees == 'live')}", highlight=False)
    if any(row.copies for row in rows):
        console.print(f"scope of copies: {describe_scopes(rows)}", highlight=False)
    hidden = ", ".join(column.name for column in COLUMNS if column not in shown)
    if hidden:
        console.print(f"no room for: {hidden} (--json has all)", highlight=False)
    for row in rows:
        if row.message:
            print_note(f"{row.balancer}: {row.message}")


def _fitting(rows: list[ComparisonRow], console: Console) -> tuple[list[Column], Table]:
    """Return the columns that fit the terminal, and their table."""
    from relibra.reporting.data.comparison_columns import COLUMNS

    shown = list(COLUMNS)
    while True:
        for space in (2, 1):
            table = _table(rows, shown, space)
            if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
                return shown, table
        last = max(shown, key=lambda column: column.spare)
        if not last.spare:
            return shown, table
        shown.remove(last)


def _table(rows: list[ComparisonRow], columns: list[Column], space: int) -> Table:
    table = new_table("balancer", *(column.title for column in columns), "ok", space=space)
    table.columns[0].min_width = max(len(row.balancer) for row in rows)
    for row in rows:
        cells = ["-" if row.skew is None else column.cell(row) for column in columns]
        table.add_row(row.balancer, *cells, "yes" if row.valid else "NO")
    return table
