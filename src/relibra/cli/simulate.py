"""`relibra simulate`: one training step on a described cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from relibra.cli.inputs.requests import SimulateRequest, check_one_balancer, takes
from relibra.cli.inputs.workload import Workload, open_request
from relibra.cli.outputs.files import named, writing
from relibra.cli.outputs.simulated_faults import FAULT_UNITS, fault_facts
from relibra.cli.outputs.simulated_iteration import UNITS, iteration_facts
from relibra.cli.outputs.simulated_step import SimulatedPlan, simulate_balancer
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.errors import ConfigError

MAX_TIMELINE_RANKS = 16


@takes(SimulateRequest)
def simulate(request: SimulateRequest) -> None:
    """Simulate a training step on recorded routes: what limits it, where its time goes, what a plan saves.

    Overlap ratio: seconds that a token-slot computes / seconds that it travels; below 1 traffic cannot be hidden behind
    experts. Limits: parts of the step, the largest first; a straggler is time in which only the busiest ranks compute.
    Where kept_static is true, no change saves more seconds than it costs; a larger --micro-batch-tokens may. Ways to
    send: the plan's rows sent in each way; bytes, messages and factors of the forward dispatch, seconds of both passes.

    Example: relibra simulate runs/demo --ranks 8 --cluster h100x8 --model qwen3-30b-a3b
    """
    from relibra.planning.registry import find_balancer

    check_one_balancer("simulate", request.balancer)
    find_balancer(request.balancer)  # an unknown name fails before anything is read
    if request.iteration and request.pipeline_stages > 1:
        raise ConfigError("--iteration with --pipeline-stages: activations are chosen for one stage, leave one out")
    workload = open_request(request, named("--timeline", request.timeline))
    found = {}
    for name in dict.fromkeys(("static", request.balancer)):
        with progress(f"planning and simulating {name} (the first run compiles kernels)"):
            found[name] = simulate_balancer(replace(request, balancer=name), workload)
    if request.timeline is not None:
        _write_timeline(request.timeline, workload, found[request.balancer])
    facts = _facts(request, workload, found)
    if request.iteration:
        with progress("planning and simulating the iteration"):
            facts |= iteration_facts(request, workload, found)
    if request.faults:
        with progress("planning and simulating losses of a rank"):
            facts |= fault_facts(request, workload, found[request.balancer])
    workload.note_problems(request.balancer)
    units = {"parts": "seconds", "memory": "bytes", "activations_static": "bytes", **UNITS, **FAULT_UNITS}
    print_result(facts, as_json=request.as_json, units=units)


def _facts(request: SimulateRequest, workload: Workload, plans: dict[str, SimulatedPlan]) -> dict[str, object]:
    """Return what is printed; what limits the step comes first."""
    chosen, static = plans[request.balancer], plans["static"]
    return {
        **chosen.limits(),
        **workload.facts(),
        **chosen.figures(static),
        "parts": {term: {name: item.step.terms[term] for name, item in plans.items()} for term in chosen.step.terms},
        "ways_to_send": chosen.ways_to_send(),
        "activations_static": chosen.memory.activations_static,
        "balancer": request.balancer,
        "static_seconds": static.step.seconds,
        "static_skew": static.skew,
        "static_bytes_by_kind": static.step.bytes.as_dict(),
        "static_memory_bytes": static.memory.total,
        "memory": dict(chosen.memory.parts),
        "pipeline_stages": request.pipeline_stages,
        "static_stage_layers": static.stage_layers(),
        "recompute": request.recompute,
        "layers_of_model": {"simulated": chosen.model.layers, "of": chosen.model.part_of or chosen.model.layers},
        "steps_served": request.steps,
    }


def _write_timeline(path: Path, workload: Workload, simulated: SimulatedPlan) -> None:
    from relibra.simulation import simulated_timeline, with_mini_batches

    plan = simulated.plan
    scheduled, _ = with_mini_batches(plan.scheduled(workload.demand))
    ranks = list(range(min(plan.num_ranks, MAX_TIMELINE_RANKS)))
    made = simulated_timeline(
        plan, scheduled, simulated.machine, simulated.model, simulated.how, ranks=ranks,
        micro_batches=[0], distinct=workload.count_rows(plan, scheduled),
    )  # fmt: skip
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save_perfetto(path)
    print_note(f"timeline: {path} (micro-batch 0 of ranks 0 to {ranks[-1]}); open it in ui.perfetto.dev")
