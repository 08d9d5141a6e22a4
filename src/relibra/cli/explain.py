"""`relibra explain`: a plan in words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.outputs.files import find_demand
from relibra.cli.outputs.terminal import print_text
from relibra.errors import ConfigError
from relibra.number_ranges import ranges_in_words


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
    from relibra.reporting.data.compared_plans import check_same_sizes
    from relibra.routing.demand_files import read_demand

    made = read_plan(plan)
    if diff is not None:
        later = read_plan(diff)
        check_same_sizes((str(plan), made), (str(diff), later))
        difference = compute_difference(made, later)
        print_text(json.dumps(asdict(difference)) if as_json else str(difference))
        return
    if layer is None:
        raise ConfigError(f"name a layer of {plan} with --layer: it has {ranges_in_words(made.layer_ids.tolist())}")
    text = explain_plan(made, read_demand(find_demand(plan, demand)), layer, micro_batch)
    print_text(json.dumps({"layer": layer, "explanation": text.splitlines()}) if as_json else text)
