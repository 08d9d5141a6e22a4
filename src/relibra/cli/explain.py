"""`relibra explain`: a plan in words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.outputs.files import demand_path
from relibra.cli.outputs.terminal import plural, ranges_in_words
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from relibra.planning.plan import StepPlan


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan written by relibra plan.")],
    layer: Annotated[int | None, typer.Option(min=0, help="Decoder layer to explain.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=0, help="Micro-batch to explain; default: the one that gains most.")
    ] = None,
    demand: Annotated[
        Path | None, typer.Option(help="Demand of the plan; default: NAME.demand.safetensors beside it.")
    ] = None,
    diff: Annotated[Path | None, typer.Option(help="List the differences to this later plan instead.")] = None,
    as_json: options.Json = False,
) -> None:
    """Explain what a plan does in one layer and why, or list how two plans differ.

    Example: relibra explain plan.safetensors --layer 0
    """
    from relibra.planning.analysis.explanation import diff as compute_difference
    from relibra.planning.analysis.explanation import explain_plan
    from relibra.planning.plan_files import read_plan
    from relibra.routing.demand_files import read_demand

    made = read_plan(plan)
    if diff is not None:
        later = read_plan(diff)
        _check_same_sizes(plan, made, diff, later)
        difference = compute_difference(made, later)
        typer.echo(json.dumps(asdict(difference)) if as_json else str(difference))
        return
    if layer is None:
        raise ConfigError(f"name a layer of {plan} with --layer: it has {ranges_in_words(made.layer_ids.tolist())}")
    place = demand or demand_path(plan)
    if not place.exists():
        raise ConfigError(f"{place} does not exist: explaining a plan needs its demand, name it with --demand")
    text = explain_plan(made, read_demand(place), layer, micro_batch)
    typer.echo(json.dumps({"layer": layer, "explanation": text.splitlines()}) if as_json else text)


def _check_same_sizes(path: Path, plan: StepPlan, other_path: Path, other: StepPlan) -> None:
    """Raise a ConfigError when two plans differ in ranks, experts or layers."""
    for noun in ("rank", "expert", "layer"):
        sizes = [len(p.layer_ids) if noun == "layer" else getattr(p, f"num_{noun}s") for p in (plan, other)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{path} is for {plural(sizes[0], noun)}, {other_path} for {sizes[1]:,}: only plans for equal ranks, "
                "experts and layers can be compared"
            )
