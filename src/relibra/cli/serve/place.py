"""`relibra serve place`: which expert worker holds which experts, from recorded routes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.inputs.requests import takes, within
from relibra.cli.outputs.files import check_outputs, named, writing
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.errors import TraceError


@dataclass(frozen=True, kw_only=True)
class ServePlaceRequest:
    """Recorded routes, and the workers that hold the experts.

    trace TRACE  Routes of served answers (relibra serve MODEL --record FOLDER), or any trace of the model.
    experts N  Expert workers.
    spare_experts N  Experts of a layer that a worker holds beyond its share, for copies.
    cap RATIO  Load of the busiest worker / mean, up to which rows are saved.
    batch_tokens N  Tokens that decode together: copies are chosen in batches of as many.
    seed N  Seed of the search and of the batches.
    output FILE  Write the last placement of the table, JSON, for relibra serve MODEL --placement FILE.
    """

    trace: Annotated[Path, typer.Argument()]
    experts: Annotated[int, within(1, 64)]
    spare_experts: Annotated[int, within(0)] = 0
    cap: Annotated[float, within(1, 64)] = 1.05
    batch_tokens: Annotated[int, within(1)] = 64
    seed: Annotated[int, within(0)] = 0
    num_experts: options.NumExperts = None
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    as_json: options.Json = False


@takes(ServePlaceRequest)
def place(request: ServePlaceRequest) -> None:
    """Place the experts that tokens pick together on one worker, so that a token goes to few of them.

    Plans on every second sample and scores on the others, which it has not seen. Rows per token are workers that a
    token goes to, once each; a row per choice would be its top k. Busiest worker is its choices / those of the mean
    worker: over all scored tokens, and in a batch of them. All are means over layers.

    Example: relibra serve place runs/demo --experts 4 --spare-experts 1 --cap 1.05 --output placement.json
    """
    import numpy as np

    from relibra.planning.deployment.deployment_files import write_expert_placement
    from relibra.planning.deployment.expert_placement import ExpertPlacement
    from relibra.planning.deployment.expert_workers import plan_placements
    from relibra.planning.deployment.worker_choice import count_traffic
    from relibra.routing.readers import open_trace

    recording = find_recording(request.trace)
    check_outputs(named("--output", request.output), [("TRACE", recording.trace)])
    if recording.label:
        print_note(recording.label)
    trace = open_trace(recording.trace, request.num_experts)
    halves = [trace.select(range(first, trace.num_samples, 2)) for first in (0, 1)]
    planned_TLK, scored_TLK = (half.experts_TLK[half.valid_T] for half in halves)
    if not len(planned_TLK) or not len(scored_TLK):
        raise TraceError(f"{recording.trace}: half of the samples has no routes; a placement needs two samples or more")
    with progress(f"placing experts on {request.experts} workers"):
        held = plan_placements(
            planned_TLK,
            trace.num_experts,
            request.experts,
            spare=request.spare_experts,
            cap=request.cap,
            seed=request.seed,
        )
        rows = {
            name: asdict(
                count_traffic(
                    scored_TLK,
                    held_LNE,
                    np.random.default_rng(request.seed),
                    cap=request.cap,
                    batch=request.batch_tokens,
                )
            )
            for name, held_LNE in held.items()
        }
    if request.output is not None:
        best = ExpertPlacement.from_arrays(trace.layer_ids, held["picked together"], [*held.values()][-1], request.cap)
        with writing(request.output):
            write_expert_placement(request.output, best)
    facts = {
        "planned_tokens": len(planned_TLK),
        "scored_tokens": len(scored_TLK),
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "workers": request.experts,
        "batch_tokens": request.batch_tokens,
        "placements": rows,
    }
    print_result(facts, as_json=request.as_json)
