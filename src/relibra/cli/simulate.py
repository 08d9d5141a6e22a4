"""`relibra simulate`: one training step on a described cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from relibra.cli.inputs import options
from relibra.cli.inputs.models import model_in_words, other_model_in_words
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.inputs.requests import SimulationRequest, check_one_balancer, takes
from relibra.cli.inputs.workload import Workload, budget_for, describe_budget, open_workload, workload_in_words
from relibra.cli.outputs.files import check_outputs, input_files, named, writing
from relibra.cli.outputs.simulated_step import (
    SimulatedPlan,
    execution_of,
    moves_in_words,
    simulate_balancer,
    static_plan_in_words,
)
from relibra.cli.outputs.terminal import new_table, print_note, print_wrapped, progress, stdout_console
from relibra.printable import plural

MAX_TIMELINE_RANKS = 16
ROUNDING = 1e-9
"""Parts below this share of a step are rounding errors of sums."""


@dataclass(frozen=True, kw_only=True)
class SimulateRequest(SimulationRequest):
    """A simulated step, and where to write it."""

    timeline: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Also write the first micro-batch as a trace for ui.perfetto.dev."),
    ] = None
    as_json: options.Json = False


@takes(SimulateRequest)
def simulate(request: SimulateRequest) -> None:
    """Simulate a training step on recorded routes: what limits it, where its time goes, what a plan saves.

    Example: relibra simulate runs/demo --ranks 8 --cluster h100x8 --model qwen3-30b-a3b
    """
    from relibra.planning.registry import find_balancer

    check_one_balancer("simulate", request.balancer)
    find_balancer(request.balancer)  # an unknown name fails before anything is read
    recording = find_recording(request.source)
    check_outputs(
        named("--timeline", request.timeline), input_files(recording.trace, request.cluster, request.schedule)
    )
    with progress(f"cutting {recording.trace}"):
        workload = open_workload(recording, request)
    found = {}
    for name in dict.fromkeys(("static", request.balancer)):
        with progress(f"planning and simulating {name} (the first run compiles kernels)"):
            found[name] = simulate_balancer(replace(request, balancer=name), workload)
    if request.timeline is not None:
        _write_timeline(request.timeline, request, workload, found[request.balancer])
    if request.as_json:
        typer.echo(json.dumps(_facts(request, workload, found)))
    else:
        _print(request, workload, found)


def _facts(request: SimulateRequest, workload: Workload, plans: dict[str, SimulatedPlan]) -> dict[str, object]:
    """Return what --json prints; what limits the step comes first."""
    chosen, static, machine = plans[request.balancer], plans["static"], workload.machine
    return {
        **chosen.limits(),
        **chosen.figures(static),
        "balancer": request.balancer,
        "static_seconds": static.step.seconds,
        "static_skew": static.skew,
        "memory": dict(chosen.memory.parts),
        "model": workload.model.name,
        "model_part": chosen.model.part_in_words,
        "cluster": machine.name,
        "cluster_label": machine.label,
        "dispatch": machine.dispatch,
        "trace": str(workload.recording.trace),
        "cut": workload.cut,
        "steps_served": request.steps,
    }


def _print(request: SimulateRequest, workload: Workload, plans: dict[str, SimulatedPlan]) -> None:
    chosen, machine, staged = plans[request.balancer], workload.machine, request.pipeline_stages > 1
    stages = (
        f", {request.pipeline_stages} pipeline stages of them: {chosen.step.layout.num_ranks} ranks in all" * staged
    )
    recomputed = ", activations recomputed" * request.recompute
    print_wrapped(*chosen.advice)
    typer.echo()
    print_wrapped(
        *workload_in_words(workload),
        f"{model_in_words(workload.model, chosen.model)}; allowed: {describe_budget(budget_for(request, workload))}"
        f"{stages}{recomputed}",
        other_model_in_words(workload.model, chosen.model),
    )
    stdout_console().print(_table(plans))
    print_wrapped(
        f"label: simulated, on {machine.name} ({machine.label}: {machine.source})",
        "straggler: seconds in which only the busiest ranks compute experts; skew: token-slots of the busiest ranks / "
        f"mean ranks; memory: of the fullest rank; {chosen.rows_from}",
        moves_in_words(request.steps) * any(one.moving_seconds for one in plans.values()),
        static_plan_in_words(request.balancer, chosen, plans["static"], workload),
        "pipeline: parts are those of each column's busiest stage; the last stage also has the output matrix" * staged,
        *chosen.step.notes,
    )


def _table(by_balancer: dict[str, SimulatedPlan]) -> Table:
    """Return a table with a column per balancer and the parts of its seconds as rows."""
    from relibra.simulation.units import bytes_in_words

    table = new_table("", *by_balancer)
    static, tokens = by_balancer["static"].step.seconds, by_balancer["static"].tokens
    plans = list(by_balancer.values())
    steps = [one.step for one in plans]

    def row(title: str, cells: list[str]) -> None:
        table.add_row(title, *cells)

    row("seconds of the step", [f"{step.seconds:.4g}" for step in steps])
    row("static / this", [f"{static / step.seconds:.3f}" for step in steps])
    row("tokens per second", [f"{tokens / step.seconds:,.0f}" for step in steps])
    row("  per rank", [f"{tokens / step.seconds / step.layout.num_ranks:,.0f}" for step in steps])
    for term in steps[0].terms:
        shares = [step.terms[term] / step.seconds for step in steps]
        if max(shares) > ROUNDING:
            cells = [
                f"{step.terms[term]:.4g}" if share > ROUNDING else "0"
                for step, share in zip(steps, shares, strict=True)
            ]
            row(f"  {'experts' if term == 'compute' else term}", cells)
        if term == "compute":
            lost = [(step.straggler_seconds(), step.seconds) for step in steps]
            row("    straggler", [f"{value:.4g}" if value > ROUNDING * whole else "0" for value, whole in lost])
    if any(one.moving_seconds for one in plans):
        row("all moves, seconds", [f"{one.moving_seconds:.4g}" for one in plans])
    row("hidden copies, seconds", [f"{max(0.0, step.hidden_copy_seconds):.4g}" for step in steps])
    row("model flops utilisation", [f"{step.model_flops_utilisation:.1%}" for step in steps])
    for link in ("inside", "between") if plans[0].machine.num_nodes > 1 else ("inside",):
        row(f"bytes {link} nodes", [""] * len(steps))
        for kind in steps[0].bytes.as_dict():
            sizes = [getattr(getattr(step.bytes, kind), link) for step in steps]
            if any(sizes):
                row(f"  {kind}", [bytes_in_words(size) for size in sizes])
    row("skew", [f"{one.skew:.3f}" for one in plans])
    row("copies", [f"{one.plan.num_copies:,}" for one in plans])
    row("memory", [bytes_in_words(one.memory.total) for one in plans])
    return table


def _write_timeline(path: Path, request: SimulateRequest, workload: Workload, one: SimulatedPlan) -> None:
    from relibra.simulation import simulated_timeline, with_mini_batches

    plan = one.plan
    scheduled, execution = with_mini_batches(plan.scheduled(workload.demand), execution_of(request))
    ranks = list(range(min(plan.num_ranks, MAX_TIMELINE_RANKS)))
    made = simulated_timeline(
        plan, scheduled, one.machine, one.model, execution, ranks=ranks,
        micro_batches=[0], distinct=workload.count_rows(plan, scheduled),
    )  # fmt: skip
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save_perfetto(path)
    print_note(f"timeline: {path} (micro-batch 0 on {plural(len(ranks), 'rank')}); open it in ui.perfetto.dev")
