"""`relibra serve place`: which expert worker holds which experts, from recorded routes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.inputs.requests import documented, within
from relibra.cli.outputs.files import check_outputs, named, writing
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.errors import TraceError

SEED = 0
"""Of the search and of the batches."""


@documented
def place(
    trace: Annotated[Path, typer.Argument()],
    experts: Annotated[int, within(1, 64)],
    spare_experts: Annotated[int, within(0)] = 0,
    cap: Annotated[float, within(1, 64)] = 1.05,
    num_experts: options.NumExperts = None,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    as_json: options.Json = False,
) -> None:
    """Place the experts that tokens pick together on one worker, so that a token goes to few of them.

    Plans on every second sample and scores on the others. Rows per token: workers that a token goes to, once each; a
    row per choice would be top k rows. Busiest worker: its choices / those of the mean worker, over all scored
    tokens and in a batch of them. All are means over layers.

    trace TRACE  Routes of served answers (relibra serve MODEL --record FOLDER), or any trace of the model.
    experts N  Expert workers.
    spare_experts N  Experts of a layer that a worker holds beyond its share, for copies.
    cap RATIO  Highest load of a worker, as a multiple of the mean, that placing experts together may cause.
    output FILE  Write the last placement of the table, JSON, for relibra serve MODEL --placement FILE.

    Example: relibra serve place runs/demo --experts 4 --spare-experts 1 --cap 1.05 --output placement.json
    """
    import numpy as np

    from relibra.planning.deployment.deployment_files import write_expert_placement
    from relibra.planning.deployment.expert_placement import ExpertPlacement
    from relibra.planning.deployment.expert_workers import plan_placements
    from relibra.planning.deployment.worker_choice import BATCH_TOKENS, count_traffic
    from relibra.routing.readers import open_trace

    recording = find_recording(trace)
    check_outputs(named("--output", output), [("TRACE", recording.trace)])
    if recording.label:
        print_note(recording.label)
    routes = open_trace(recording.trace, num_experts)
    halves = [routes.select(range(first, routes.num_samples, 2)) for first in (0, 1)]
    planned_TLK, scored_TLK = (half.experts_TLK[half.valid_T] for half in halves)
    if not len(planned_TLK) or not len(scored_TLK):
        raise TraceError(f"{recording.trace}: half of the samples has no routes; a placement needs two samples or more")
    with progress(f"placing experts on {experts} workers"):
        held = plan_placements(planned_TLK, routes.num_experts, experts, spare=spare_experts, cap=cap, seed=SEED)
        rows = {
            name: asdict(count_traffic(scored_TLK, one, np.random.default_rng(SEED), cap=cap))
            for name, one in held.items()
        }
    if output is not None:
        best = ExpertPlacement.from_arrays(routes.layer_ids, held["picked together"], [*held.values()][-1], cap)
        with writing(output):
            write_expert_placement(output, best)
    facts = {
        "planned_tokens": len(planned_TLK),
        "scored_tokens": len(scored_TLK),
        "layers": routes.num_layers,
        "experts": routes.num_experts,
        "top_k": routes.top_k,
        "workers": experts,
        "batch_tokens": BATCH_TOKENS,
        "placements": rows,
    }
    print_result(facts, as_json=as_json)
