"""`fault_facts`: what to do when a rank is lost, and what cover costs: load whose expert has an instance left then."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf
from statistics import median

from relibra.cli.inputs.requests import SimulateRequest, SimulationRequest
from relibra.cli.inputs.workload import Workload, budget_for, open_workload
from relibra.cli.outputs.simulated_step import SimulatedPlan, simulate_balancer, simulate_plan
from relibra.cli.outputs.terminal import print_note
from relibra.errors import ConfigError, RelibraError

FAULT_UNITS = {"curve": "samples per second until the next loss, by seconds until then", "best_from": "seconds"}
TRAINING = ("recompute", "update")
"""Stages of a run whose seconds follow the simulated step; the others keep theirs."""
HORIZONS = (60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 604_800.0)
COVER_SLOTS = (1, 2, 4)
DEFAULT_EVERY = 10
"""Steps between checkpoints where neither an option nor a run gives a number: the default of a run."""


def fault_facts(request: SimulateRequest, workload: Workload, chosen: SimulatedPlan) -> dict[str, object]:
    """Return cover and its price, and a row per policy and per horizon; the lost rank is the one with least cover.

    raises   ConfigError for one rank, which nobody can replace, and for a step without tokens
    """
    from relibra.planning.costs.copies import slot_bytes
    from relibra.reporting.data.recording import open_recording
    from relibra.simulation.fault_coverage import cover_plan, replica_cover, step_cover
    from relibra.simulation.faults import Recovery, best_policies, reroute_slowdown, without_rank

    R, groups, restart = workload.machine.num_ranks, request.groups, request.restart_seconds
    if R == 1:
        raise ConfigError("--faults with --ranks 1: no rank is left that could go on, choose 2 or more")
    if not chosen.tokens:
        raise ConfigError(f"--faults: the step of {workload.recording.trace} has no tokens, choose another recording")
    recording = open_recording(workload.recording.run or workload.recording.trace, request.num_experts)
    of_run, before = recording.setting("checkpoint", "every"), chosen.step.seconds_without_relocation
    every = request.checkpoint_every or (isinstance(of_run, int) and of_run) or DEFAULT_EVERY
    stage_seconds = [row["seconds"] for row in recording.metrics.rows if isinstance(row.get("seconds"), dict)]
    if not stage_seconds or recording.setting("parallel", "ranks") != R:
        stage_seconds = [{"update": before}]
    measured = median(float(sum(table.values())) for table in stage_seconds)
    trained = median(float(sum(table.get(stage, 0.0) for stage in TRAINING)) for table in stage_seconds)
    scheduled = chosen.plan.scheduled(workload.demand)

    # What cover costs while no rank is lost.
    by_slots = {f"{slots} slots": cover_plan(chosen.plan, scheduled, slots) for slots in COVER_SLOTS}
    plans, cover, gib = {"plan": chosen.plan, **by_slots}, {}, budget_for(request, workload).memory_gib or 0.0
    for name, plan in plans.items():
        cover_R = step_cover(plan, scheduled)
        cover[name] = {
            "mean": float(cover_R.mean()),
            "worst_rank": float(cover_R.min()),
            "worst_in_a_layer": float(replica_cover(plan, scheduled).min()),
            "kept": plan.resident,
            "skew": plan.skew(scheduled),
            "slot_bytes": (taken := slot_bytes(plan, chosen.model.expert)),
            "fits": taken <= gib * 2**30,
            "step_seconds": simulate_plan(plan, request, workload, chosen.model)[0].seconds_without_relocation,
        }

    # Policies: seconds of a step, seconds of a pause, steps that are made again, ranks.
    world = R * groups * request.pipeline_stages
    lost = int(step_cover(chosen.plan, scheduled).argmin())
    fetch_seconds = chosen.model.expert.state_bytes / workload.machine.inter_receive.bytes_per_second  # of an expert
    found: dict[str, tuple[float, float, float, int]] = {}
    for name, plan in [*plans.items(), ("", chosen.plan)]:
        plan_of_others, fetched_R = without_rank(plan, scheduled, lost, anew=not name)
        step, *_ = simulate_plan(plan_of_others, request, workload, chosen.model)
        # `without_rank` writes homes of the lost experts as replicas, which nobody pushes: take off their pushes.
        pushed = step.terms["copies"] - chosen.step.terms["copies"]
        seconds = max(step.seconds_without_relocation - pushed, before)
        if not name or cover[name]["fits"]:
            policy = f"take over, {name}" if name else "fetch and re-place"
            found[policy] = (seconds, float(fetched_R.max()) * fetch_seconds, 0.0, world)
    if fewer := _on_fewer_ranks(request, workload):
        found["shrink"] = (fewer[1] * chosen.tokens, restart, every / 2, fewer[0] * world // R)
    found["spare"] = (before, restart, every / 2, world + 1)
    if groups > 1:
        slower = reroute_slowdown(request.pipeline_stages, len(scheduled.tokens_MLRE), groups, [1])
        found["peers take over"] = (before * slower, 0.0, 0.0, world)
    found = {name: (measured + trained * (one[0] / before - 1), *one[1:]) for name, one in found.items()}
    policies = [
        Recovery(
            policy=policy,
            ranks=ranks,
            samples=int((scheduled.micro_batch_S >= 0).sum()) * groups,
            step_seconds=seconds,
            pause_seconds=pause + redone * seconds,
        )
        for policy, (seconds, pause, redone, ranks) in found.items()
    ]
    return {
        "lost_rank": lost,
        "steps_between_checkpoints": every,
        "step_seconds_before": measured,
        "cover": cover,
        "policies": [{**asdict(one), "samples_per_second_per_rank": one.rate(inf) / one.ranks} for one in policies],
        "curve": [{"horizon": horizon, **{one.policy: one.rate(horizon) for one in policies}} for horizon in HORIZONS],
        "best_from": [{"horizon": horizon, "policy": one.policy} for horizon, one in best_policies(policies)],
    }


def _on_fewer_ranks(request: SimulationRequest, workload: Workload) -> tuple[int, float] | None:
    """Return the largest smaller number of ranks that fits experts and nodes, and its seconds per token; None: none."""
    refusals: list[RelibraError] = []
    for ranks in range(request.ranks - 1, 0, -1):
        if workload.demand.load_MLE.shape[-1] % ranks:
            continue
        try:
            own = replace(request, ranks=ranks)
            found = simulate_balancer(own, open_workload(workload.recording, own))
            return ranks, found.step.seconds_without_relocation / found.tokens
        except RelibraError as error:
            refusals.append(error)
    print_note(f"shrink: left out, {refusals[0] if refusals else 'no smaller number divides the experts'}")
    return None
