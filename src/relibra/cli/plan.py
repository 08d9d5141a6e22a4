"""`relibra plan`: plan one step and write the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import PlanningRequest, check_one_balancer, takes
from relibra.cli.inputs.workload import Workload, budget_for, open_request
from relibra.cli.outputs.files import NamedPath, demand_path, named, writing
from relibra.cli.outputs.plan_page import check_page, write_page
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.errors import ConfigError, PlanError

if TYPE_CHECKING:
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
_EXPORT = f"Also write decisions for a trainer (.npz), or a placement for an engine: {FORMATS}."


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanningRequest):
    """Options of `relibra plan`: the balancer, what it may change, and the files to write.

    previous PLAN  Plan of the previous step: a warm start.
    output PATH  File for the plan.
    """

    balancer: options.Balancer = "relibra"
    previous: Path | None = None
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("plan.safetensors")
    export: Annotated[list[str] | None, typer.Option(metavar="FORMAT=PATH", help=_EXPORT)] = None

    def exports(self) -> list[NamedPath]:
        """Return format and path of each --export; raises ConfigError for one that is not FORMAT=PATH."""
        parts = [text.partition("=") for text in self.export or []]
        for form, equals, path in parts:
            if form not in EXPORTS or not path:
                raise ConfigError(f"--export {form + equals + path!r} is not FORMAT=PATH with a format of {FORMATS}")
        return [(form, Path(path)) for form, _, path in parts]


@takes(PlanRequest)
def plan(request: PlanRequest) -> None:
    """Plan one step from known routes: homes, schedule, replicas and token quotas; write the plan.

    The demand of the step is written beside it (NAME.demand.safetensors), for relibra explain. Printed are skew (load
    of the busiest ranks / of mean ranks in token-slots), the skew after each lever of the plan and the lowest that
    copies could reach from there, and seconds and bytes of the planner's model of the machine. Skew may rise where
    that saves seconds.

    Example: relibra plan runs/demo --ranks 4 --micro-batch-tokens 64
    """
    from relibra.planning.plan_files import read_plan
    from relibra.planning.planner import plan_step
    from relibra.planning.registry import find_balancer
    from relibra.reporting.data.comparison import compile_kernels, measure

    check_one_balancer("plan", request.balancer)
    if request.balancer == "live":
        raise ConfigError(
            "--balancer live decides in each layer from routes that nobody has recorded, so there is no plan to write: "
            "train with plan.balancer=live or relibra.parallel.balance_live, see what it would reach with "
            "relibra compare --balancer live, or plan with --balancer relibra"
        )
    outputs = [
        ("--output", request.output),
        ("the demand of --output", demand_path(request.output)),
        *named("--html", request.html),
        *((f"--export {form}", path) for form, path in request.exports()),
    ]
    check_page(request.html)
    entry = find_balancer(request.balancer)
    previous = None if request.previous is None else read_plan(request.previous)
    workload = open_request(request, outputs, named("--previous", request.previous))
    workload.note_problems(request.balancer)
    machine, demand, expert = workload.machine, workload.demand, workload.model.expert
    budget = budget_for(request, workload)
    given: dict[str, Any] = {"expert": expert, "previous": previous, "history_MLE": workload.history_MLE}
    with progress("planning two layers, so that kernels are compiled (half a minute, once per installation)"):
        compiled_seconds = compile_kernels(demand, machine, budget, request.balancer, **given)
    if compiled_seconds > 1:
        print_note(f"kernels compiled in {compiled_seconds:.0f} s, once per installation")
    with progress(f"planning with {request.balancer}"):
        made = plan_step(demand, machine, budget, request.balancer, **given)
        static = plan_step(demand, machine, budget, "static", expert=expert, previous=previous)
    row = measure(
        made,
        demand,
        machine,
        expert,
        balancer=made.balancer,
        sees=entry.sees if made.balancer == request.balancer else "",
    ).with_relocation_over(request.steps)
    if not row.valid:
        raise PlanError(row.message)
    overwritten = request.output.exists()
    _write(made, demand, request)
    if request.html is not None:
        write_page(request.html, made, workload)
    facts = _facts(request, workload, made, row, static)
    print_result({**facts, "overwritten": overwritten}, as_json=request.as_json)


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

    levers, reachable = dict(lever_gaps(plan, workload.demand)), dict(lever_bounds(plan, workload.demand))
    moves = static.predicted["relocation"]
    return {
        **workload.facts(),
        **{name: value for name, value in row.figures().items() if name not in ("sees", "message")},
        "dispatch": plan.dispatch,
        "exchange_is_a_lower_bound": workload.demand.pairs_LEE is not None,
        "static_predicted_seconds": static.predicted["total"] - moves + moves / request.steps,
        "steps_served": request.steps,
        "skew_before": next(iter(levers.values())),
        "levers": levers,
        "lever_bounds": reachable,
        "predicted": dict(plan.predicted),
        "slot_memory": slot_memory(plan, workload.model.expert)._asdict(),
        "digest": plan.digest(),
        "plan": str(request.output),
        "demand": str(demand_path(request.output)),
        "exports": {form: str(path) for form, path in request.exports()},
    }
