"""`relibra compare`: every balancer on the same step, in one table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from relibra.cli.inputs import pages, workload
from relibra.cli.trace import visible
from relibra.errors import PlanError

if TYPE_CHECKING:
    from relibra.planning.analysis.comparison import ComparisonRow
    from relibra.planning.plan import StepPlan
    from relibra.routing.demand import Demand


def compare(
    context: typer.Context,
    trace: workload.TracePath,
    ranks: workload.Ranks,
    ranks_per_node: workload.RanksPerNode = None,
    cluster: workload.ClusterName = "h100x8",
    slots: workload.Slots = 1,
    micro_batch_tokens: workload.MicroBatchTokens = None,
    order: workload.OrderOption = workload.Order.RECORDED,
    seed: workload.Seed = 0,
    take: workload.TakeOption = workload.Take.SECOND_HALF,
    balancer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only these: names in a row, or each after its own --balancer. Default: all.",
        ),
    ] = None,
    objective: workload.ObjectiveOption = workload.Measure.TOKENS,
    model: workload.Model = workload.DEFAULT_MODEL,
    num_experts: workload.NumExperts = None,
    html: workload.Page = None,
    as_json: workload.Json = False,
) -> None:
    """Plan one step with every balancer and print skew, bound, copies, volumes and times side by side.

    Example: relibra compare runs/demo/traces/step-00000 --ranks 4 --micro-batch-tokens 256
    """
    from relibra.planning.analysis.comparison import comparable, iterate_comparison, with_levers
    from relibra.planning.budget import Budget

    outputs = [] if html is None else [("--html", html)]
    workload.check_outputs(outputs, workload.inputs_of(trace, cluster))
    machine, expert = workload.open_cluster(cluster), workload.open_expert(model)
    budget = Budget(slots=slots, objective=objective.value, seed=seed)
    names = _chosen(balancer, context.args) or comparable()
    for name in names:
        with_levers(name, budget)  # a wrong name is told before the trace is read
    with workload.progress(f"cutting {trace}"):
        machine, (demand, history_MLE, cut) = workload.open_step(
            trace, num_experts, machine, ranks, ranks_per_node, cut=(micro_batch_tokens, order, seed, take)
        )
    if history_MLE is None:
        typer.echo("no history: balancers that see only the past plan from even loads", err=True)
    found = []
    plans = iterate_comparison(demand, machine, budget, names, expert=expert, history_MLE=history_MLE)
    for number, name in enumerate(names):
        with workload.progress(f"planning with {name} ({number + 1} of {len(names)}; a first run compiles kernels)"):
            found.append(next(plans))
    rows = [row for row, _ in found]
    if all(plan is None for _, plan in found):
        raise PlanError(rows[0].message)  # nobody could: a fault of the question
    if html is not None:
        _write_page(html, found, demand, (machine, model, trace, num_experts))
    if as_json:
        typer.echo(json.dumps([row.figures() for row in rows]))
        return
    typer.echo(workload.size_in_words(demand, machine))
    typer.echo(cut)
    typer.echo(
        f"{workload.plural(slots, 'spare slot')} per rank; plans made for {objective.value}; expert sizes of {model}"
    )
    print_comparison(rows)


def _chosen(balancers: list[str] | None, more: list[str]) -> list[str]:
    """Names given with --balancer and after it, each once; other stray words are a wrong usage."""
    if more and not balancers:
        raise typer.BadParameter(f"unexpected argument {more[0]!r}: one trace; balancers come after --balancer")
    return list(dict.fromkeys([*(balancers or []), *more]))


def _write_page(
    html: Path, found: list[tuple[ComparisonRow, StepPlan | None]], demand: Demand, about: pages.About
) -> None:
    """Draw the most even of relibra's plans or, without one, of all plans."""
    valid = [(row, plan) for row, plan in found if plan is not None and row.valid]
    if not valid:
        typer.echo("no page: no balancer made a valid plan", err=True)
        return
    own = [pair for pair in valid if pair[0].balancer.startswith("relibra")]
    _, shown = min(own or valid, key=lambda pair: pair[0].skew or 0.0)
    pages.write_page_of_plan(html, shown, demand, about, [row for row, _ in found])


class Column(NamedTuple):
    """One column of the table: its title, its cell where a plan was made, what it means, and how soon it may go.

    spare    0: always shown; else the column with the largest number goes first where the terminal is too narrow
    """

    title: str
    cell: Callable[[ComparisonRow], str]
    meaning: str
    spare: int = 0


COLUMNS = (
    Column(
        "skew",
        lambda row: f"{row.skew:.3f}",
        "busiest ranks / mean ranks in token-slots, summed over micro-batches and layers",
    ),
    Column(
        "bound",
        lambda row: f"{row.bound:.3f}",
        "the lowest skew with this row's own homes, slots, schedule and scope of copies",
        2,
    ),
    Column(
        "any\nhomes",
        lambda row: f"{row.bound_any_homes:.3f}",
        "the bound if each cell of the step had homes of its own",
        9,
    ),
    Column("gap", lambda row: f"{row.gap:.1%}", "skew / bound - 1", 3),
    Column("copies", lambda row: f"{row.copies_per_micro_batch_layer:.1f}", "per micro-batch and layer", 4),
    Column("moved\nGB", lambda row: f"{(row.moved_bytes or 0) / 1e9:.1f}", "state of experts with a new home", 7),
    Column(
        "across\nnodes",
        lambda row: _short(row.cross_node_token_slots or 0),
        "token-slots computed on another node than they come from",
        8,
    ),
    Column("plan\ns", lambda row: f"{row.plan_seconds:.2f}", "measured here", 5),
    Column(
        "step s\nmodel",
        lambda row: f"{row.predicted_seconds:.3g}",
        "model of the MoE layers, with at least the rows that travel; not a measurement",
        1,
    ),
)


def print_comparison(rows: list[ComparisonRow]) -> None:
    """Print the rows as a table that fits the terminal, what its columns mean, then what went wrong."""
    from relibra.planning.analysis.comparison import LEVERS_IN_WORDS, scopes_in_words

    console = Console()
    shown, table = _fitting(rows, console)
    console.print(table)
    console.print("\n" + "; ".join(f"{_name(column)}: {column.meaning}" for column in shown), highlight=False)
    console.print(f"scope of copies: {scopes_in_words(rows)}", highlight=False)
    if any("+" in row.balancer for row in rows):
        console.print(LEVERS_IN_WORDS, highlight=False)
    hidden = ", ".join(_name(column) for column in COLUMNS if column not in shown)
    if hidden:
        console.print(f"no room for: {hidden} (--json has all)", highlight=False)
    for row in rows:
        if row.message:
            typer.echo(f"{row.balancer}: {visible(row.message)}", err=True)


def _fitting(rows: list[ComparisonRow], console: Console) -> tuple[list[Column], Table]:
    """Return the columns for which there is room, and their table."""
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
    table = Table(box=None, padding=(0, space, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("balancer", no_wrap=True, min_width=max(len(line) for line in _names(rows)))
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("ok", justify="right", no_wrap=True)
    for row in rows:
        cells = ["-" if row.skew is None else column.cell(row) for column in columns]
        table.add_row(_folded(row.balancer), *cells, "yes" if row.valid else "NO")
    return table


def _names(rows: list[ComparisonRow]) -> list[str]:
    return ["balancer", *(line for row in rows for line in _folded(row.balancer).splitlines())]


def _name(column: Column) -> str:
    return column.title.replace("\n", " ")


def _folded(name: str) -> str:
    """Break a long set of levers before its last lever."""
    head, plus, tail = name.rpartition("+")
    return name if len(name) <= 15 or not plus else f"{head}\n  +{tail}"


def _short(count: int) -> str:
    """Write a large number with three digits.

    >>> _short(12_345_678), _short(950)
    ('12.3M', '950')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
