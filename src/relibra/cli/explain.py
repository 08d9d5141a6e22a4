"""`relibra explain`: what was tried for a plan, its decisions in a layer, or its differences to another one."""

from __future__ import annotations

from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.outputs.files import find_demand
from relibra.cli.outputs.terminal import new_table, print_text, print_wrapped, stdout_console
from relibra.errors import ConfigError
from relibra.number_ranges import format_ranges

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.planning.plan import StepPlan


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan written by relibra plan.")],
    layer: Annotated[
        int | None, typer.Option(min=0, help="Decoder layer to explain; default: what was tried for the step.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=0, help="Micro-batch to explain; default: the one that gains most.")
    ] = None,
    demand: options.Demand = None,
    diff: Annotated[Path | None, typer.Option(help="List the differences to this later plan instead.")] = None,
    as_json: options.Json = False,
) -> None:
    """Print what was tried for a step and its predicted cost, one layer's decisions, or how two plans differ.

    Seconds are predicted by the planner's model of the machine.

    Example: relibra explain plan.safetensors --layer 0
    """
    from relibra.planning.analysis.explanation import diff as compute_difference
    from relibra.planning.analysis.explanation import explain_plan
    from relibra.planning.plan_files import read_plan
    from relibra.reporting.data.compared_plans import check_same_sizes
    from relibra.reporting.data.moved_experts import moved_experts
    from relibra.routing.demand_files import read_demand

    made = read_plan(plan)
    if diff is not None:
        later = read_plan(diff)
        check_same_sizes((str(plan), made), (str(diff), later))
        facts = asdict(compute_difference(made, later))
        print_result(facts if as_json else {"homes_moved": len(facts.pop("homes"))} | facts, as_json=as_json)
        return
    if layer is None:
        choices = [asdict(choice) for choice in made.considered]
        if not choices:
            raise ConfigError(
                f"{plan} by {made.balancer} lists no choices: name a layer with --layer: it has "
                f"{format_ranges(made.layer_ids.tolist())}"
            )
        of_layers = _layer_choices(made, made.layer_ids >= 0)
        facts = {"balancer": made.balancer, "considered": choices, "considered_layers": of_layers}
        print_result(facts, as_json=as_json)
        return
    of_plan = read_demand(find_demand(plan, demand))
    explained = asdict(explain_plan(made, of_plan, layer, micro_batch))
    replicas = [replica._asdict() for replica in explained.pop("replicas")]
    moved = [
        asdict(move) for move in moved_experts(made, made.scheduled(of_plan), made.layer_ids.tolist().index(layer))
    ]
    choices = _layer_choices(made, made.layer_ids == layer)
    if as_json:
        print_text(json.dumps({**explained, "moved": moved, "replicas": replicas, "considered": choices}))
        return
    print_text("\n".join(f"{name:<26}  {_cell(value)}" for name, value in explained.items()))
    _print_rows(moved, "moves, all made together; loads of ranks from homes alone, in means; local: share of the "
                       "expert's token-slots from its home's node")  # fmt: skip
    _print_rows(replicas, "replicas; home_load of the home's rank, in means: above 1 the replica takes load off it, "
                          "else it keeps token-slots from travelling or makes room at the home")  # fmt: skip
    _print_rows(
        choices, "choices priced for this layer; seconds are predicted (label model), micro_batches of the plan"
    )


def _print_considered(path: Path, plan: StepPlan, *, as_json: bool) -> None:
    """Print the choices that were priced for the step, and those of all layers.

    raises    ConfigError for a plan of a balancer that prices none
    """
    choices, layers = [asdict(choice) for choice in plan.considered], _layer_choices(plan, plan.layer_ids >= 0)
    if not choices:
        raise ConfigError(
            f"{path} by {plan.balancer} lists no choices: name a layer with --layer: it has "
            f"{ranges_in_words(plan.layer_ids.tolist())}"
        )
    if as_json:
        print_text(json.dumps({"balancer": plan.balancer, "considered": choices, "considered_layers": layers}))
        return
    print_text(f"{plan.balancer}: choices for the step, then for its layers; seconds are predicted (label model)")
    _print_rows(choices)
    _print_rows(layers)


def _layer_choices(plan: StepPlan, chosen_L: ndarray) -> list[dict[str, Any]]:
    """Return the choices that were priced for some layers, with the sums of these layers."""
    return [
        {
            **{name: value for name, value in asdict(choice).items() if not name.endswith("_L")},
            "seconds": float(sum(compress(choice.seconds_L, chosen_L))),
            "micro_batches": int(sum(compress(choice.micro_batches_L, chosen_L))),
        }
        for choice in plan.considered_layers
    ]


def _print_rows(rows: Sequence[Mapping[str, object]], title: str | None = None) -> None:
    """Print a table with a column for each field, below its title."""
    if not rows:
        return
    if title is not None:
        print_text("")
        print_wrapped(title)
    table = new_table()
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    stdout_console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "yes" if value else "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
