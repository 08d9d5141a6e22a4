"""`iteration_facts`: where the seconds of an iteration go, and what each lever changes, for `relibra simulate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from relibra.cli.inputs.requests import SimulationRequest
from relibra.cli.inputs.workload import Workload
from relibra.cli.outputs.simulated_step import SimulatedPlan, execution_of, simulate_balancer
from relibra.cli.outputs.terminal import print_note

if TYPE_CHECKING:
    from relibra.simulation.training_passes import TrainingPasses

UNITS = {"iteration": "seconds", "levers": "seconds of the iteration, of its training stages"}


def iteration_facts(
    request: SimulationRequest, workload: Workload, plans: dict[str, SimulatedPlan]
) -> dict[str, object]:
    """Return the stages of the iteration, predicted beside measured, and a row per lever, for JSON and for a terminal.

    plans   of the static layout and of the requested balancer
    """
    from relibra.reporting.data.iteration_stages import levers_of, measured_stages, stage_table
    from relibra.reporting.data.recording import open_recording
    from relibra.simulation.training_passes import Iteration

    recording = open_recording(workload.recording.run or workload.recording.trace, request.num_experts)
    measured, routes, chosen = measured_stages(recording.metrics), workload.open_routes(), plans[request.balancer]
    iteration = Iteration.of_lengths(
        routes.rows_per_sample, routes.prompt_lengths, chosen.machine, chosen.model, measured.get("reward", 0.0)
    )
    levers = levers_of(recording)
    own, static = (_passes(replace(request, balancer=it), workload, plans[it]) for it in (request.balancer, "static"))
    changes = {
        "as it is": (own, levers),
        "static layout": (static, levers),
        "old log-probs: all": (own, replace(levers, old_log_probs="all")),
        "old log-probs: first mini-batch free": (own, replace(levers, old_log_probs="later")),
        "old log-probs: none": (own, replace(levers, old_log_probs="none")),
        "activations: recomputed": (own, replace(levers, activations="recomputed")),
        "activations: kept where they fit": (own, replace(levers, activations="kept")),
        "activations: chosen": (own, replace(levers, activations="chosen")),
        "rollout: ahead by 1": (own, replace(levers, ahead=1)),
    }
    once = own
    if (shared := workload.with_prompts(shared=True)).demand.attended_S is None:
        print_note("prompts once: left out, no responses share one in this schedule; only mini-batches let them share")
    else:
        once, repeated = (
            _passes(request, it, simulate_balancer(request, it)) for it in (shared, workload.with_prompts(shared=False))
        )
        changes |= {"prompts: repeated": (repeated, levers), "prompts: once": (once, levers)}
    changes["all together"] = (once, replace(levers, old_log_probs="later", activations="chosen", ahead=1))
    found = {name: iteration.predict(*change) for name, change in changes.items()}
    now = found["as it is"]
    return {
        "iteration": stage_table(now, measured),
        "levers": {
            name: {
                "seconds": one.seconds,
                "times_as_fast": now.seconds / one.seconds,
                "training": one.training,
                "training_as_fast": now.training / one.training,
                "gib": one.bytes / 2**30,
                "fits": one.fits,
                "kept": str(one.kept),
            }
            for name, one in found.items()
        },
    }


def _passes(request: SimulationRequest, workload: Workload, simulated: SimulatedPlan) -> TrainingPasses:
    from relibra.simulation.training_passes import simulate_passes

    scheduled = simulated.plan.scheduled(workload.demand)
    return simulate_passes(
        simulated.plan, scheduled, simulated.machine, simulated.model, execution_of(request),
        steps_served=request.steps, distinct=workload.count_rows(simulated.plan, scheduled),
    )  # fmt: skip
