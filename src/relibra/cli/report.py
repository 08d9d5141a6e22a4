"""`relibra report`: an HTML page about a run, a trace or a plan, or about two runs or plans side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.models import choose_model, open_model
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.inputs.requests import takes, within
from relibra.cli.inputs.workload import open_cluster
from relibra.cli.outputs.files import check_outputs, find_demand, named
from relibra.cli.outputs.plan_page import check_page
from relibra.cli.outputs.terminal import progress
from relibra.errors import ConfigError
from relibra.printable import printable

if TYPE_CHECKING:
    from relibra.reporting.data.compared_plans import ComparedPlan
    from relibra.timeline import Timeline

PLAN_SUFFIX = ".safetensors"
TRACE_REMEDY = "name the trace of the plan with --trace to count its rows, as relibra plan --html does"


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """Options of `relibra report`: what the page shows, and its file.

    path RUN|TRACE|PLAN  Run folder, trace folder, .npz or .npy of expert choices, or a plan.
    other [OTHER]  A second run or plan to compare with the first.
    output  File for the page.
    trace  Trace that the plan was made from: bytes between ranks are then counted, not bounded.
    timeline PATH  Also show this timeline, a file of write_timeline; may be repeated.
    ranks R  Plan the last step for so many ranks; default: the run's.
    """

    path: Annotated[Path, typer.Argument()]
    other: Annotated[Path | None, typer.Argument()] = None
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    trace: Path | None = None
    demand: options.Demand = None
    timeline: list[Path] | None = None
    ranks: Annotated[int | None, within(1, 1 << 15)] = None
    cluster: options.ClusterName = "h100x8"
    model: options.Model = None
    num_experts: options.NumExperts = None
    as_json: options.Json = False

    def timelines(self) -> list[tuple[str, Timeline]]:
        """Read the timelines; each with the name of its file."""
        from relibra.timeline import read_timeline

        return [(path.stem, read_timeline(path)) for path in self.timeline or []]


@takes(ReportRequest)
def report(request: ReportRequest) -> None:
    """Write a self-contained HTML page: what limits the model, loads before and after a plan, timelines, curves.

    Example: relibra report runs/demo
    """
    files = (request.path, request.other, request.demand)
    inputs = [("PLAN", path) for path in files if path is not None and path.is_file()]
    check_outputs(named("--output", request.output), inputs)
    if _is_plan(request.path):
        page = _report_plans(request)
    elif request.other is not None:
        page = _report_two_runs(request.path, request.other, request.output)
    else:
        page = _report_recording(request)
    typer.echo(json.dumps({"report": str(page)}) if request.as_json else printable(str(page)))


def _is_plan(path: Path) -> bool:
    return path.suffix == PLAN_SUFFIX and not path.is_dir()


def _report_recording(request: ReportRequest) -> Path:
    from relibra.reporting import write_report

    timelines = request.timelines()
    with progress(f"reading {request.path}, planning its last step and drawing"):
        return write_report(
            request.path,
            request.output,
            num_experts=request.num_experts,
            ranks=request.ranks,
            cluster=open_cluster(request.cluster),
            model=None if request.model is None else open_model(request.model),
            timelines=timelines,
        )


def _report_two_runs(path: Path, other: Path, output: Path | None) -> Path:
    from relibra.reporting.pages.comparison_page import write_comparison

    if _is_plan(other):
        raise ConfigError(f"{path} is a run and {other} a plan: compare two runs, or two plans")
    return write_comparison(path, other, output or Path(f"{path.resolve().name}-{other.resolve().name}.report.html"))


def _report_plans(request: ReportRequest) -> Path:
    from relibra.reporting.data.compared_plans import can_count_rows, compare_static, compare_step
    from relibra.reporting.html.page import write_page
    from relibra.reporting.pages.plan_page import render_plan_page
    from relibra.routing.readers import open_trace

    path, other, timelines = request.path, request.other, request.timelines()
    check_page(path)
    trace = None if request.trace is None else find_recording(request.trace).trace
    first = _read_plan(path, request.demand, "the plan" if other is None else _short_name(path, other))
    if other is None:
        plans = compare_static(first.plan, first.given), first
    else:
        plans = first, _read_plan(other, request.demand, _short_name(other, path))
    plan = plans[1].plan
    with progress("simulating and drawing"):
        cluster = open_cluster(request.cluster).with_ranks(plan.num_ranks, plan.ranks_per_node)
        routes = None if trace is None else open_trace(trace, request.num_experts)
        step = compare_step(plans, cluster, choose_model(request.model, trace or path), routes)
        output = request.output or path.with_name(f"{path.stem}.report.html")
        remedy = TRACE_REMEDY if trace is None and can_count_rows(plans) else ""
        return write_page(output, render_plan_page(step, datetime.now(UTC), timelines=timelines, remedy=remedy))


def _short_name(path: Path, beside: Path) -> str:
    return f"plan {path}" if path.stem == beside.stem else f"plan {path.stem}"


def _read_plan(path: Path, demand: Path | None, name: str) -> ComparedPlan:
    from relibra.planning.plan_files import read_plan
    from relibra.reporting.data.compared_plans import compare_plan
    from relibra.routing.demand_files import read_scheduled_demand

    if not path.exists() or not _is_plan(path):
        raise ConfigError(f"{path} is not a plan (NAME{PLAN_SUFFIX} of relibra plan): compare a plan with another plan")
    return compare_plan(name, read_plan(path), read_scheduled_demand(find_demand(path, demand)))
