"""`relibra trace`: look at recorded routes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from relibra.errors import TraceError

app = typer.Typer(no_args_is_help=True, help="Look at recorded routes: inspect, validate, stats.")

TracePath = Annotated[Path, typer.Argument(metavar="PATH", help="Trace folder, or .npz of per-token expert choices.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
NumExperts = Annotated[
    int | None,
    typer.Option(min=1, help="Experts per layer, where the format does not say (.npz); default: next multiple of 8."),
]


@app.command()
def inspect(path: TracePath, num_experts: NumExperts = None, as_json: Json = False) -> None:
    """Print the sizes and the origin of a trace; for a trace folder only its index is read.

    Example: relibra trace inspect runs/demo/traces/step-00000
    """
    from relibra.routing.readers import open_trace
    from relibra.routing.trace_files import read_index

    if path.is_dir():
        index = read_index(path)
        facts = {
            "samples": index.samples,
            "rows": index.rows,
            "layers": len(index.layer_ids),
            "layer_ids": (layer_ids := index.layer_ids),
            "experts": index.num_experts,
            "choices_per_token": index.top_k,
            "shards": len(index.shards),
            "bytes": sum(shard.size for shard in index.shards),
            "groups": index.group_names,
            "source": index.source,
        }
    else:
        trace = open_trace(path, num_experts)
        facts = {
            "samples": trace.num_samples,
            "rows": trace.num_rows,
            "layers": trace.num_layers,
            "layer_ids": (layer_ids := trace.layer_ids.tolist()),
            "experts": trace.num_experts,
            "choices_per_token": trace.top_k,
            "shards": 1,
            "bytes": path.stat().st_size,
            "groups": list(trace.group_names),
            "source": trace.source,
        }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else _runs(layer_ids) if name == "layer_ids" else value
        if shown not in ("", []):
            typer.echo(f"{name.replace('_', ' '):<18} {', '.join(shown) if isinstance(shown, list) else shown}")


@app.command()
def validate(path: TracePath, num_experts: NumExperts = None, as_json: Json = False) -> None:
    """Check every byte and every row of a trace; exit code 1 and one sentence at the first fault.

    Example: relibra trace validate runs/demo/traces/step-00000
    """
    from relibra.routing.readers import iterate_routes

    samples = rows = missing = 0
    with Console(stderr=True).status(f"checking {path}"):
        for piece in iterate_routes(path, num_experts):
            samples, rows = samples + piece.num_samples, rows + piece.num_rows
            missing += int((~piece.valid_T).sum())
    if as_json:
        typer.echo(json.dumps({"valid": True, "samples": samples, "rows": rows, "rows_without_route": missing}))
    else:
        typer.echo(f"valid: {samples:,} samples, {rows:,} rows, {missing:,} of them without a route")


@app.command()
def stats(
    path: TracePath,
    ranks: Annotated[str, typer.Option(help="Sizes of the expert-parallel group, comma-separated.")] = "8,16,32",
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Consecutive tokens per micro-batch.")] = 2048,
    group: Annotated[str | None, typer.Option(help="Only the samples of this named group.")] = None,
    num_experts: NumExperts = None,
    as_json: Json = False,
) -> None:
    """Print how uneven the load is: rank skew of the static layout per group size, and stability over micro-batches.

    Example: relibra trace stats runs/demo/traces/step-00000 --ranks 2,4,8
    """
    from relibra.routing.readers import iterate_routes
    from relibra.routing.survey import survey
    from relibra.routing.trace import RoutingTrace

    def of_group(piece: RoutingTrace) -> RoutingTrace:
        if group is None:
            return piece
        if group not in piece.group_names:
            raise TraceError(f"{path} has no group {group!r}: its groups are {list(piece.group_names)}")
        wanted = piece.group_names.index(group)
        return piece.select([s for s, g in enumerate(piece.group_ids.tolist()) if g == wanted])

    with Console(stderr=True).status(f"counting {path}"):
        result = survey(
            lambda: map(of_group, iterate_routes(path, num_experts)),
            ranks=_rank_counts(ranks),
            micro_batch_tokens=micro_batch_tokens,
        )
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    typer.echo(
        f"{result.rows:,} rows of {result.samples:,} samples, {result.layers} layers, "
        f"{result.top_k} of {result.experts} experts per token; "
        f"{result.micro_batches} micro-batches of {result.micro_batch_tokens:,} tokens"
    )
    table = Table(title="rank skew (max / mean token-slots), static layout", title_justify="left")
    for column in ("ranks", "mean", "median", "p95", "max", "balancedness"):
        table.add_column(column, justify="right")
    for row in result.layouts:
        figures = (row.skew_mean, row.skew_median, row.skew_p95, row.skew_max, row.balancedness)
        table.add_row(str(row.ranks), *(f"{figure:.2f}" for figure in figures))
    Console().print(table)
    typer.echo(
        f"expert skew {result.expert_skew:.2f} per micro-batch, {result.step_expert_skew:.2f} over the whole trace "
        f"(max_vio {result.max_vio:.2f}, load cv {result.load_cv:.2f})"
    )
    typer.echo(f"cosine of a micro-batch's expert load to the whole trace's: {result.cosine_to_mean:.3f} on average")


def _rank_counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",") if part.strip().isdigit() and int(part) > 0]
    if not counts or len(counts) != len(text.split(",")):
        raise typer.BadParameter(f"{text!r} is not a list of numbers of ranks like 8,16,32", param_hint="--ranks")
    return counts


def _runs(layer_ids: list[int]) -> str:
    """Write ascending numbers as runs: 1-3, 5."""
    runs: list[list[int]] = []
    for layer in layer_ids:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
