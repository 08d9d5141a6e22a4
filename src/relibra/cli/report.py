"""`relibra report`: one HTML page about a run, a trace or a plan, or about two runs or plans side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli.inputs import simulated, workload
from relibra.cli.plan import demand_path
from relibra.cli.trace import Json, NumExperts, refuse_other_experts, visible
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from relibra.reporting.data.compared_plans import Side
    from relibra.timeline import Timeline

PLAN_SUFFIX = ".safetensors"
COUNT_ROWS = "name the trace of the plan with --trace to count them, as relibra plan --html does"


def report(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|TRACE|PLAN", help="Run folder, trace folder or .npz of choices, or a plan.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="A second run or plan, to be held beside the first.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the page.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="The trace that a plan was made from: bytes are then counted token by token."),
    ] = None,
    demand: Annotated[
        Path | None, typer.Option(help="The demand of a plan; default: NAME.demand.safetensors beside it.")
    ] = None,
    timeline: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Also show this timeline, a file of write_timeline; repeat for more."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 15, metavar="R", help="Plan the last step for so many ranks; default: the run's."),
    ] = None,
    cluster: workload.ClusterName = "h100x8",
    model: simulated.ModelName = None,
    num_experts: NumExperts = None,
    as_json: Json = False,
) -> None:
    """Write a self-contained HTML page: what limits the model, loads before and after a plan, timelines, curves.

    Example: relibra report runs/demo
    """
    timelines = [_timeline(place) for place in timeline or []]
    if _is_plan(path):
        page = _of_plans(path, other, output, demand, trace, (cluster, model, num_experts), timelines)
    elif other is not None:
        page = _of_runs(path, other, output)
    else:
        page = _of_recording(path, output, ranks, (cluster, model, num_experts), timelines)
    typer.echo(json.dumps({"report": str(page)}) if as_json else visible(str(page)))


def _is_plan(path: Path) -> bool:
    return path.suffix == PLAN_SUFFIX and not path.is_dir()


def _of_recording(
    path: Path,
    output: Path | None,
    ranks: int | None,
    machine: tuple[str, str | None, int | None],
    timelines: list[tuple[str, Timeline]],
) -> Path:
    from relibra.reporting import write_report

    cluster, model, num_experts = machine
    refuse_other_experts(path, num_experts)
    with workload.progress(f"reading {path}, planning its last step and drawing"):
        return write_report(
            path,
            output,
            num_experts=num_experts,
            ranks=ranks,
            cluster=workload.open_cluster(cluster),
            model=None if model is None else simulated.open_model(model),
            timelines=timelines,
        )


def _of_runs(path: Path, other: Path, output: Path | None) -> Path:
    from relibra.reporting.pages.comparison_page import write_comparison

    if _is_plan(other):
        raise ConfigError(f"{path} is a run and {other} a plan: compare two runs, or two plans")
    return write_comparison(path, other, output or Path(f"{path.resolve().name}-{other.resolve().name}.report.html"))


def _of_plans(
    path: Path,
    other: Path | None,
    output: Path | None,
    demand: Path | None,
    trace: Path | None,
    machine: tuple[str, str | None, int | None],
    timelines: list[tuple[str, Timeline]],
) -> Path:
    from relibra.reporting.data.compared_plans import refuse_other_sizes, static_side
    from relibra.reporting.data.planned_step import countable, distinct_of
    from relibra.reporting.pages.plan_page import Question, write_plan_page
    from relibra.routing.readers import open_trace
    from relibra.simulation import cut_model

    cluster, model, num_experts = machine
    first = _side(path, demand, "the plan" if other is None else _short_name(path, other))
    if other is None:
        before, after = static_side(first.plan, first.given), first
    else:
        before, after = first, _side(other, demand, _short_name(other, path))
        refuse_other_sizes(before, after)
    plan = after.plan
    if trace is not None:
        refuse_other_experts(trace, num_experts)
    with workload.progress("simulating and drawing"):
        question = Question(
            cluster=workload.open_cluster(cluster).with_ranks(plan.num_ranks, plan.ranks_per_node),
            model=cut_model(simulated.open_model(model or workload.DEFAULT_MODEL), after.given),
            timelines=timelines,
            distinct=None if trace is None else distinct_of(open_trace(trace, num_experts), before, after),
            remedy=COUNT_ROWS if trace is None and countable(before, after) else "",
        )
        return write_plan_page(output or path.with_name(f"{path.stem}.report.html"), before, after, question)


def _short_name(path: Path, beside: Path) -> str:
    return f"plan {path}" if path.stem == beside.stem else f"plan {path.stem}"


def _side(path: Path, demand: Path | None, name: str) -> Side:
    from relibra.planning.plan_files import read_plan
    from relibra.reporting.data.compared_plans import side_of
    from relibra.routing.demand_files import read_demand

    if not path.exists() or _is_plan(path) is False:
        raise ConfigError(f"{path} is no plan (NAME{PLAN_SUFFIX} of relibra plan): compare a plan with another plan")
    place = demand or demand_path(path)
    if not place.exists():
        raise ConfigError(f"{place} is not there, and without the demand a plan has no loads: name it with --demand")
    return side_of(name, read_plan(path), read_demand(place))


def _timeline(path: Path) -> tuple[str, Timeline]:
    from relibra.timeline import read_timeline

    return path.stem, read_timeline(path)
