"""`relibra compare`: every balancer on the same step, in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from relibra.cli import workload
from relibra.cli.trace import visible
from relibra.errors import PlanError

if TYPE_CHECKING:
    from relibra.planning.comparison import ComparisonRow
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
    from relibra.planning.budget import Budget
    from relibra.planning.comparison import comparable, iterate_comparison, with_levers
    from relibra.planning.objective import expert_shape

    machine, expert = workload.open_cluster(cluster, ranks, ranks_per_node), expert_shape(model)
    budget = Budget(slots=slots, objective=objective.value, seed=seed)
    names = _chosen(balancer, context.args) or comparable()
    for name in names:
        with_levers(name, budget)  # a wrong name is told before the trace is read
    workload.check_outputs(None, html)
    with workload.progress(f"cutting {trace}"):
        demand, history_MLE = workload.open_step(
            trace, num_experts, ranks=ranks, tokens=micro_batch_tokens, order=order, seed=seed, take=take
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
        _write_page(html, found, demand)
    if as_json:
        typer.echo(json.dumps([row.figures() for row in rows]))
        return
    typer.echo(workload.size_in_words(demand, machine))
    typer.echo(
        f"{slots} spare slot{'s' * (slots != 1)} per rank; plans made for {objective.value}; expert sizes of {model}"
    )
    print_comparison(rows)


def _chosen(balancers: list[str] | None, more: list[str]) -> list[str]:
    """Names given with --balancer and after it, each once; other stray words are a wrong usage."""
    if more and not balancers:
        raise typer.BadParameter(f"unexpected argument {more[0]!r}: one trace; balancers come after --balancer")
    return list(dict.fromkeys([*(balancers or []), *more]))


def _write_page(html: Path, found: list[tuple[ComparisonRow, StepPlan | None]], demand: Demand) -> None:
    """Draw the most even of relibra's plans or, without one, of all plans."""
    from relibra.reporting.plan_page import write_plan_page

    valid = [(row, plan) for row, plan in found if plan is not None and row.valid]
    if not valid:
        typer.echo("no page: no balancer made a valid plan", err=True)
        return
    own = [pair for pair in valid if pair[0].balancer.startswith("relibra")]
    _, shown = min(own or valid, key=lambda pair: pair[0].skew or 0.0)
    page = write_plan_page(html, shown, demand, [row for row, _ in found])
    typer.echo(f"page: {visible(str(page))}", err=True)


def print_comparison(rows: list[ComparisonRow]) -> None:
    """Print the rows as a table of at most 80 columns, then what went wrong."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("balancer", max_width=15, overflow="fold")
    for title in ("skew", "bound", "gap", "copies", "moved\nGB", "across\nnodes", "plan\ns", "step s\nmodel", "ok"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(_folded(row.balancer), *_cells(row), "yes" if row.valid else "NO")
    console = Console()
    console.print(table)
    console.print(
        "\nskew: busiest ranks / mean ranks in token-slots, summed over micro-batches and layers; "
        "bound: the lowest skew with these homes, slots and this schedule; copies: per micro-batch and layer; "
        "moved: state of experts with a new home; across nodes: token-slots computed on another node than they come "
        "from; plan s: measured here; step s: model of the MoE layers, not a measurement",
        highlight=False,
    )
    for row in rows:
        if row.message:
            typer.echo(f"{row.balancer}: {visible(row.message)}", err=True)


def _folded(name: str) -> str:
    """Break a long set of levers before its last lever."""
    head, plus, tail = name.rpartition("+")
    return name if len(name) <= 15 or not plus else f"{head}\n  +{tail}"


def _cells(row: ComparisonRow) -> list[str]:
    if row.skew is None or row.bound is None or row.gap is None:
        return ["-"] * 8
    return [
        f"{row.skew:.3f}",
        f"{row.bound:.3f}",
        f"{row.gap:.1%}",
        f"{row.copies_per_micro_batch_layer:.1f}",
        f"{(row.moved_bytes or 0) / 1e9:.1f}",
        _short(row.cross_node_token_slots or 0),
        f"{row.plan_seconds:.2f}",
        f"{row.predicted_seconds:.3g}",
    ]


def _short(count: int) -> str:
    """Write a large number with three digits.

    >>> _short(12_345_678), _short(950)
    ('12.3M', '950')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
