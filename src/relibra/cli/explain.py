"""`relibra explain`: what was tried for a plan, its decisions in a layer, or its differences to another one."""

from __future__ import annotations

from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.requests import documented, within
from relibra.cli.outputs.files import find_demand
from relibra.cli.outputs.terminal import print_result
from relibra.errors import ConfigError
from relibra.number_ranges import format_ranges

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.planning.plan import StepPlan


@documented
def explain(
    plan: Annotated[Path, typer.Argument()],
    layer: Annotated[int | None, within(0)] = None,
    micro_batch: Annotated[int | None, within(0)] = None,
    demand: options.Demand = None,
    diff: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Print what was tried for a step and its predicted cost, one layer's decisions, or how two plans differ.

    Seconds are predicted by the planner's model of the machine. home_load, from_load, to_load: without replicas / the
    mean rank's; local: share of an expert's token-slots from its home's node. All moves of a layer are made together. A
    replica takes load off its home where home_load is above 1; else it keeps token-slots from travelling, or makes room
    at the home.

    plan PLAN  A plan written by relibra plan.
    layer  Decoder layer to explain; default: what was tried for the step.
    micro_batch  Micro-batch to explain; default: the one that gains most.
    diff  List the differences to this later plan instead.

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
        print_result(facts if as_json else {"moved_homes": len(facts.pop("homes"))} | facts, as_json=as_json)
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
    plan_demand = read_demand(find_demand(plan, demand))
    explained = explain_plan(made, plan_demand, layer, micro_batch)
    moved = moved_experts(made, made.scheduled(plan_demand), made.layer_ids.tolist().index(layer))
    facts = {
        **asdict(explained),
        "moved": [asdict(expert) for expert in moved],
        "replicas": [replica._asdict() for replica in explained.replicas],
        "considered": _layer_choices(made, made.layer_ids == layer),
    }
    print_result(facts, as_json=as_json)


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
