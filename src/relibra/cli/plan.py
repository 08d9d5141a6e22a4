"""`relibra plan`: plan one step and write the plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.recordings import Recording, find_recording
from relibra.cli.inputs.requests import PlanningRequest, check_one_balancer, takes
from relibra.cli.inputs.workload import Workload, budget_for, describe_budget, open_workload, workload_in_words
from relibra.cli.outputs.files import NamedPath, check_outputs, demand_path, input_files, named, writing
from relibra.cli.outputs.plan_page import write_page
from relibra.cli.outputs.terminal import print_note, print_text, progress
from relibra.errors import ConfigError, PlanError
from relibra.printable import plural, printable

if TYPE_CHECKING:
    from relibra.planning.budget import Budget
    from relibra.planning.costs.step_bytes import StepBytes
    from relibra.planning.plan import StepPlan
    from relibra.reporting.data.comparison import ComparisonRow
    from relibra.routing.demand import ScheduledDemand

EXPORTS = {
    "trainer": "write_trainer_npz",
    "sglang": "write_sglang_json",
    "vllm": "write_vllm_json",
    "vllm-ascend": "write_vllm_ascend_json",
    "tensorrt-llm": "write_tensorrt_llm_yaml",
}
"""Formats of --export, and their functions in `relibra.planning.exports`."""
FORMATS = ", ".join(EXPORTS)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanningRequest):
    """Options of `relibra plan`: the balancer, what it may change, and the files to write."""

    balancer: options.Balancer = "relibra"
    previous: Annotated[Path | None, typer.Option(metavar="PLAN", help="Plan of the previous step: a warm start.")] = (
        None
    )
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="File for the plan.")] = Path(
        "plan.safetensors"
    )
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT=PATH",
            help=f"Also write decisions for a trainer (.npz), or a placement for an engine: {FORMATS}.",
        ),
    ] = None

    def exports(self) -> list[NamedPath]:
        """Return format and path of each --export; raises ConfigError for one that is not FORMAT=PATH."""
        words = [word.partition("=") for word in self.export or []]
        for form, equals, path in words:
            if form not in EXPORTS or not path:
                raise ConfigError(f"--export {form + equals + path!r} is not FORMAT=PATH with a format of {FORMATS}")
        return [(form, Path(path)) for form, _, path in words]


@takes(PlanRequest)
def plan(request: PlanRequest) -> None:
    """Plan one step from known routes: homes, schedule, replicas and token quotas; write the plan.

    The demand of the step is written beside it (NAME.demand.safetensors), for relibra explain.

    Example: relibra plan runs/demo --ranks 4 --micro-batch-tokens 64
    """
    from relibra.planning.plan_files import read_plan
    from relibra.planning.planner import plan_step
    from relibra.planning.registry import find_balancer
    from relibra.reporting.data.comparison import measure

    check_one_balancer("plan", request.balancer)
    _refuse_live(request.balancer)
    recording = find_recording(request.source)
    _check_paths(request, recording)
    entry = find_balancer(request.balancer)
    previous = None if request.previous is None else read_plan(request.previous)
    with progress(f"cutting {recording.trace}"):
        workload = open_workload(recording, request)
    if missing := workload.missing_history(request.balancer):
        print_note(missing)
    machine, demand, expert = workload.machine, workload.demand, workload.model.expert
    budget = budget_for(request, workload)
    given: dict[str, Any] = {"expert": expert, "previous": previous, "history_MLE": workload.history_MLE}
    _compile_kernels(workload, budget, request.balancer, given)
    with progress(f"planning with {request.balancer}"):
        made = plan_step(demand, machine, budget, request.balancer, **given)
        static = plan_step(demand, machine, budget, "static", expert=expert, previous=previous)
    sees = entry.sees if made.balancer == request.balancer else ""
    row = measure(made, demand, machine, expert, balancer=made.balancer, sees=sees)
    row = row.with_relocation_over(request.steps)
    if not row.valid:
        raise PlanError(row.message)
    written = "overwritten" if request.output.exists() else "written"
    _write(made, demand, request)
    if request.html is not None:
        write_page(request.html, made, workload)
    if request.as_json:
        typer.echo(json.dumps(_facts(request, workload, made, row, static)))
    else:
        _print_summary(request, workload, made, row, static, written)


def _check_paths(request: PlanRequest, recording: Recording) -> None:
    """Raise a ConfigError when a file cannot be written or would overwrite another one."""
    outputs = [
        ("--output", request.output),
        ("the demand of --output", demand_path(request.output)),
        *named("--html", request.html),
        *((f"--export {form}", path) for form, path in request.exports()),
    ]
    check_outputs(
        outputs,
        [*input_files(recording.trace, request.cluster, request.schedule), *named("--previous", request.previous)],
    )


def _refuse_live(balancer: str) -> None:
    """Raise a ConfigError for the balancer that decides while a layer runs: it follows no plan."""
    if balancer == "live":
        raise ConfigError(
            "--balancer live decides in each layer from routes that nobody has recorded, so there is no plan to write: "
            "train with plan.balancer=live or relibra.parallel.balance_live, see what it would reach with "
            "relibra compare --balancer live, or plan with --balancer relibra"
        )


def _compile_kernels(workload: Workload, budget: Budget, balancer: str, given: dict[str, Any]) -> None:
    """Plan two layers before planning is timed, and say what that took where kernels were compiled."""
    from relibra.reporting.data.comparison import compile_kernels

    with progress("planning two layers, so that kernels are compiled (half a minute, once per installation)"):
        seconds = compile_kernels(workload.demand, workload.machine, budget, balancer, **given)
    if seconds > 1:
        print_note(f"kernels compiled in {seconds:.0f} s, once per installation")


def _write(made: StepPlan, demand: ScheduledDemand, request: PlanRequest) -> None:
    from relibra.planning import exports
    from relibra.planning.plan_files import write_plan
    from relibra.routing.demand_files import write_demand

    with writing(request.output):
        write_plan(request.output, made)
    with writing(demand_path(request.output)):
        write_demand(demand_path(request.output), demand)
    for form, path in request.exports():
        with writing(path):
            getattr(exports, EXPORTS[form])(path, made, demand)


def _facts(
    request: PlanRequest, workload: Workload, plan: StepPlan, row: ComparisonRow, static: StepPlan
) -> dict[str, object]:
    from relibra.planning.analysis.explanation import slot_memory
    from relibra.planning.analysis.levers import lever_bounds, lever_gaps

    demand = workload.demand
    levers = lever_gaps(plan, demand)
    return {
        **{name: value for name, value in row.figures().items() if name not in ("sees", "message")},
        "dispatch": plan.dispatch,
        "model": workload.model.name,
        "static_predicted_seconds": _seconds(static, request.steps),
        "steps_served": request.steps,
        "skew_before": levers[0][1],
        "levers": dict(levers),
        "lever_bounds": dict(lever_bounds(plan, demand)),
        "predicted": dict(plan.predicted),
        "cut": workload.cut,
        "slot_memory": slot_memory(plan, workload.model.expert)._asdict(),
        "digest": plan.digest(),
        "plan": str(request.output),
        "demand": str(demand_path(request.output)),
    }


def _print_summary(
    request: PlanRequest, workload: Workload, plan: StepPlan, row: ComparisonRow, static: StepPlan, written: str
) -> None:
    from relibra.planning.analysis.explanation import slot_memory
    from relibra.planning.analysis.levers import lever_gaps

    steps, output = request.steps, request.output
    assert row.skew is not None, "measured"
    assert row.bytes is not None, "measured"
    across = f", {row.cross_node_copies:,} of them on another node than their home" if row.cross_node_copies else ""
    default = "" if request.model else ", the default: choose with --model"
    # From pairs of experts the exchange is a lower bound; `relibra simulate` counts rows.
    least = {"exchange": "at least " if workload.demand.pairs_LEE is not None else ""}
    terms = ", ".join(
        f"{name} {least.get(name, '')}{value / (steps if name == 'relocation' else 1):.3g}"
        for name, value in plan.predicted.items()
        if name != "total"
    )
    back = " with relocation back to it" if static.predicted["relocation"] else ""
    memory = slot_memory(plan, workload.model.expert)
    once = "; hierarchical dispatch: a token crosses to a node once" * (plan.dispatch == "hierarchical")
    spread = f"; 1/{steps} of the moves" if steps > 1 and (plan.predicted["relocation"] or back) else ""
    levers = lever_gaps(plan, workload.demand)
    summary = {
        "balancer": plan.balancer,
        "experts": f"of {workload.model.name}{default}",
        "allowed": describe_budget(budget_for(request, workload)),
        "skew": f"{levers[0][1]:.3f} static -> {row.skew:.3f} planned; bound {row.bound:.3f}, gap {row.gap:.2%}",
        "copies": f"{row.copies:,} ({row.copies_per_micro_batch_layer:.1f} per micro-batch and layer){across}",
        "slots": f"{plan.slots} per rank {'in every layer' if plan.resident else 'for all layers'}, {memory}",
        "moved": f"{row.moved_experts:,} of {plan.home_LE.size:,} experts",
        "across nodes": f"{row.cross_node_token_slots:,} token-slots{once}",
        "between nodes": _describe_bytes(row.bytes, "between", least["exchange"]),
        "inside nodes": _describe_bytes(row.bytes, "inside", least["exchange"]),
        "layers": f"{row.predicted_seconds:.3g} s, static {_seconds(static, steps):.3g} s{back} "
        f"(model: {terms}{spread})",
        "planned in": f"{plan.plan_seconds:.2f} s",
        "digest": plan.digest()[:16],
        written: f"{printable(str(output))} and {printable(demand_path(output).name)}",
        **{f"for {form}": printable(str(path)) for form, path in request.exports()},
    }
    print_text("\n".join(workload_in_words(workload)))
    for name, text in summary.items():
        print_text(f"{name:<13} {text}")
    _print_levers(plan, workload.demand, levers)


def _describe_bytes(sent: StepBytes, link: str, least: str) -> str:
    """Return the bytes of each kind over one kind of link; `least`: before rows, which pairs bound from below."""
    from relibra.simulation.units import bytes_in_words

    found = {kind: sizes[link] for kind, sizes in sent.as_dict().items() if sizes[link]}
    return ", ".join(f"{least * (kind == 'rows')}{kind} {bytes_in_words(size)}" for kind, size in found.items()) or "0"


def _seconds(plan: StepPlan, steps: int) -> float:
    """Return the modelled seconds of a step with its part of the moves."""
    moves = plan.predicted["relocation"]
    return plan.predicted["total"] - moves + moves / steps


def _print_levers(plan: StepPlan, demand: ScheduledDemand, levers: list[tuple[str, float]]) -> None:
    from relibra.planning.analysis.levers import lever_bounds

    where = "on the node of their home" if plan.scope == "node" else "on any node"
    typer.echo("skew (token-slots of the busiest ranks / mean ranks) after each lever, and the lowest skew that copies")
    typer.echo(f"could reach from there ({plural(plan.slots, 'spare slot')} per rank, copies {where}):")
    typer.echo(f"  {'':<18} {'skew':>6}  {'change':>6}  reachable")
    before = None
    for (lever, value), (_, reachable) in zip(levers, lever_bounds(plan, demand), strict=True):
        change = "" if before is None or lever == "bound" else f"{value - before:+.3f}"
        last = "" if lever == "bound" else f"{reachable:9.3f}"
        typer.echo(f"  {lever:<18} {value:6.3f}  {change:>6}  {last}".rstrip())
        before = value
    typer.echo("  a lever may change little by itself and still make the next one possible")
