"""`relibra explain`: a plan in words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli import trace as trace_verbs
from relibra.cli.inputs.workload import plural
from relibra.cli.plan import demand_path
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from relibra.planning.plan import StepPlan


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that relibra plan wrote.")],
    layer: Annotated[int | None, typer.Option(min=0, help="Decoder layer to explain.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=0, help="Micro-batch to explain; default: the one that gains most.")
    ] = None,
    demand: Annotated[
        Path | None, typer.Option(help="The demand it was made for; default: NAME.demand.safetensors beside the plan.")
    ] = None,
    diff: Annotated[Path | None, typer.Option(help="Say instead how this other, later plan differs.")] = None,
    as_json: trace_verbs.Json = False,
) -> None:
    """Say what a plan does in one layer and why, or how two plans differ.

    Example: relibra explain plan.safetensors --layer 7
    """
    from relibra.planning.analysis.explanation import diff as differ
    from relibra.planning.plan_files import read_plan
    from relibra.routing.demand_files import read_demand

    made = read_plan(plan)
    if diff is not None:
        later = read_plan(diff)
        _refuse_other_sizes(plan, made, diff, later)
        difference = differ(made, later)
        typer.echo(json.dumps(asdict(difference)) if as_json else str(difference))
        return
    if layer is None:
        layers = trace_verbs.runs(made.layer_ids.tolist())
        raise ConfigError(f"which layer of {plan}? Name one with --layer: it has {layers}")
    place = demand or demand_path(plan)
    if not place.exists():
        raise ConfigError(
            f"{place} is not there, and without the demand a plan cannot be explained: name it with --demand"
        )
    text = made.explain(read_demand(place), layer, micro_batch)
    typer.echo(json.dumps({"layer": layer, "explanation": text.splitlines()}) if as_json else text)


def _refuse_other_sizes(path: Path, plan: StepPlan, other_path: Path, other: StepPlan) -> None:
    """Two plans that differ in size have no difference that could be listed."""
    for noun in ("rank", "expert", "layer"):
        sizes = [len(p.layer_ids) if noun == "layer" else getattr(p, f"num_{noun}s") for p in (plan, other)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{path} is for {plural(sizes[0], noun)}, {other_path} for {sizes[1]:,}: only plans for equal ranks, "
                "experts and layers can be compared"
            )
