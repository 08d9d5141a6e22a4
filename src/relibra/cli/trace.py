"""`relibra trace`: sizes, checks and load statistics of recorded routes; import of routes of other programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.inputs.requests import documented, within
from relibra.cli.inputs.workload import are_experts_assumed
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.errors import RelibraError, TraceError
from relibra.number_ranges import format_ranges
from relibra.routing.import_choices import Format, ShortRows, ZeroRows

if TYPE_CHECKING:
    from relibra.routing.trace import RoutingTrace
    from relibra.routing.trace_statistics import TraceStatistics

app = typer.Typer(no_args_is_help=True, help="Recorded routes: sizes, checks, load statistics, import.")

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="Trace folder, .npz or .npy of per-token expert choices, or run: its last recorded step."
    ),
]


@app.command()
@documented
def inspect(path: TracePath, num_experts: options.NumExperts = None, as_json: options.Json = False) -> None:
    """Print the sizes and the origin of a trace; for a trace folder only its index is read.

    Example: relibra trace inspect runs/demo/traces/step-00000
    """
    import numpy as np

    from relibra.routing.readers import check_num_experts, open_trace
    from relibra.routing.trace_files import TraceIndex, read_index

    found: TraceIndex | RoutingTrace
    path = _find_trace(path)
    if path.is_dir():
        check_num_experts(path, num_experts)
        index = read_index(path)
        found, samples, rows, sizes = index, index.samples, index.rows, [shard.size for shard in index.shards]
    else:
        trace = open_trace(path, num_experts)
        found, samples, rows, sizes = trace, trace.num_samples, trace.num_rows, [path.stat().st_size]
    layer_ids = np.asarray(found.layer_ids).tolist()
    facts = {
        "samples": samples,
        "rows": rows,
        "layers": len(layer_ids),
        "layer_ids": layer_ids,
        "experts": found.num_experts,
        "experts_assumed": are_experts_assumed(path, num_experts),
        "top_k": found.top_k,
        "shards": len(sizes),
        "bytes": sum(sizes),
        "groups": list(found.group_names),
        "source": found.source,
    }
    print_result(facts if as_json else {**facts, "layer_ids": format_ranges(layer_ids)}, as_json=as_json)
    if facts["experts_assumed"]:
        print_note("the number of experts is assumed (next multiple of 8 above the largest id); --num-experts sets it")
    if path.suffix == ".npy" and samples == 1:
        print_note("an .npy holds no lengths: save an .npz with seqlen if these are several samples")


@app.command()
@documented
def validate(path: TracePath, num_experts: options.NumExperts = None, as_json: options.Json = False) -> None:
    """Check every byte and row of a trace; the first fault is printed and gives exit code 1.

    Example: relibra trace validate runs/demo/traces/step-00000
    """
    samples = rows = missing = 0
    try:
        path = _find_trace(path)
        with progress(f"checking {path}"):
            for piece in _pieces(path, num_experts):
                samples, rows = samples + piece.num_samples, rows + piece.num_rows
                missing += int((~piece.valid_T).sum())
    except (RelibraError, OSError) as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"valid": False, "error": str(error)}))
        raise typer.Exit(1) from error
    facts = {"valid": True, "samples": samples, "rows": rows, "rows_without_route": missing}
    print_result(facts, as_json=as_json)


@app.command()
@documented
def stats(
    path: TracePath,
    ranks: str | None = None,
    rows_per_micro_batch: Annotated[int | None, within(1, 1 << 40)] = None,
    group: str | None = None,
    num_experts: options.NumExperts = None,
    as_json: options.Json = False,
) -> None:
    """Print how uneven the load is: rank skew of the static layout for several numbers of ranks, change over time.

    Rank skew is max / mean token-slots over ranks, per micro-batch and layer. Printed are mean, median, p95 and max of
    these; weighted: sum of max / sum of mean; idle: share of the expert time that ranks wait. The last micro-batch may
    be shorter. The figures are those of `relibra report`.

    Homes: three ways to place experts on ranks: by number; for even load; on one rank those that tokens pick together
    (load 1.05, or the second way's if more). Of each: ranks of a token, its own included; load of busiest rank / mean.
    Places come from every second sample, figures from the others; of a large trace from few samples and layers.

    ranks  Ranks of the expert-parallel group, comma-separated; default: those of 8,16,32 that divide the experts, else
        the smallest divisors of the experts.
    rows_per_micro_batch  Consecutive rows per micro-batch, over all ranks; default: 2048, or less so that there are at
        least eight.
    group  Only the samples of this named group.

    Example: relibra trace stats runs/demo --ranks 2,4,8
    """
    wanted = None if ranks is None else _rank_counts(ranks)
    path = _find_trace(path)
    from relibra.routing.trace_statistics import compute_statistics, default_ranks

    with progress(f"counting {path}"):
        result = compute_statistics(
            lambda: _pieces(path, num_experts, group),
            ranks=wanted or default_ranks,
            micro_batch_tokens=rows_per_micro_batch,
        )
        homes = _compare_homes(
            _pieces(path, num_experts, group), [row.ranks for row in result.layouts], result.micro_batch_tokens
        )
    if wanted is None:
        _print_left_out(result)
    print_result({**result.figures(), "homes": homes}, as_json=as_json)


@app.command(name="import")
@documented
def import_(
    paths: Annotated[list[Path], typer.Argument()],
    to: Path,
    format: Format,
    num_experts: Annotated[int, within(1)],
    layers: str | None = None,
    zero_rows: ZeroRows = ZeroRows.REFUSE,
    short_rows: ShortRows = ShortRows.REFUSE,
    top_k: Annotated[int | None, within(1)] = None,
    recorded_layers: Annotated[int | None, within(1)] = None,
    as_json: options.Json = False,
) -> None:
    """Write routes that an engine or a framework recorded as a trace; docs/recordings.md has each format.

    paths FILE...  Files of one format, imported in this order.
    to FOLDER  Trace folder to write.
    format  What recorded the routes; answers: JSON of vLLM, SGLang and others.
    num_experts  Experts per layer of the model.
    layers 1-26  Decoder layers with experts; default: all recorded ones, numbered from 0.
    zero_rows  Rows that are zero in every layer: refuse, write as rows without a route, or leave out their samples.
    short_rows  Samples with fewer rows than tokens: refuse them, or say which tokens lack a row.
    top_k  Choices per token, for answers of SGLang.
    recorded_layers  Length of the layer axis, for answers of SGLang: all decoder layers.

    Example: relibra trace import answers.jsonl --format answers --num-experts 128 --to traces/answers
    """
    from relibra.routing.readers import formats
    from relibra.routing.readers.formats.normalise import ImportCounts, iterate_pieces
    from relibra.routing.trace_files import TraceWriter

    rules = formats.ImportRules(
        num_experts=num_experts,
        layers=None if layers is None else _layer_numbers(layers),
        zero_rows=zero_rows,
        short_rows=short_rows,
        top_k=top_k,
        recorded_layers=recorded_layers,
    )
    counts = ImportCounts()
    samples = formats.import_samples(paths, format, rules)
    source = f"{format.value}: {paths[0].name}" + f" and {len(paths) - 1} more" * (len(paths) > 1)
    with progress(f"importing {paths[0]}") as shown, TraceWriter(to) as writer:
        for piece in iterate_pieces(samples, rules, counts, source=source):
            writer.append(piece)
            shown.update(f"importing: {counts.samples:,} samples, {counts.rows:,} rows")
    print_result({"trace": str(to), **asdict(counts)}, as_json=as_json)


def _compare_homes(
    pieces: Iterable[RoutingTrace], ranks: Sequence[int], micro_batch_tokens: int
) -> list[dict[str, Any]]:
    """Return rows per token and loads under each way of placing experts; none where there is one sample."""
    from relibra.planning.deployment.expert_workers import plan_placements
    from relibra.planning.deployment.worker_choice import LOAD_CAP, count_traffic
    from relibra.routing.trace_statistics import keep_halves

    planned_TLK, scored_TLK, num_experts = keep_halves(pieces)
    rows: list[dict[str, Any]] = []
    for number in ranks if len(planned_TLK) and len(scored_TLK) else ():
        placements = plan_placements(planned_TLK, num_experts, number, spare=0, cap=LOAD_CAP, starts=1)
        for name, held_LNE in placements.items():
            found = count_traffic(scored_TLK, held_LNE, batch=micro_batch_tokens)
            loads = {"busiest_rank": found.busiest_worker, "busiest_in_micro_batch": found.busiest_in_batch}
            rows.append({"ranks": number, "homes": name, "rows_per_token": found.rows_per_token, **loads})
    return rows


def _layer_numbers(text: str) -> tuple[int, ...]:
    """Return the layers of "1-26,28"."""
    parts = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip()) for part in text.split(",")]
    numbers = [n for part in parts if part for n in range(int(part[1]), int(part[2] or part[1]) + 1)]
    if not all(parts) or not numbers or numbers != sorted(set(numbers)):
        raise typer.BadParameter(f"{text!r} is not a list of ascending layers like 1-26,28", param_hint="--layers")
    return tuple(numbers)


def _print_left_out(result: TraceStatistics) -> None:
    from relibra.routing.trace_statistics import DEFAULT_RANKS

    shown = [row.ranks for row in result.layouts]
    missing = [ranks for ranks in DEFAULT_RANKS if ranks not in shown]
    if missing:
        instead = "" if shown[0] in DEFAULT_RANKS else f"; shown instead: {', '.join(map(str, shown))}"
        listed = ", ".join(map(str, missing))
        print_note(f"not possible with {result.experts} experts: {listed} ranks{instead}; choose with --ranks")


def _find_trace(path: Path) -> Path:
    """Return the path, or the last recorded step of a run, which is named on stderr."""
    recording = find_recording(path)
    if recording.label:
        print_note(recording.label)
    return recording.trace


def _pieces(path: Path, num_experts: int | None, group: str | None = None) -> Iterator[RoutingTrace]:
    """Yield the routes of a path in pieces, only the samples of a group where one is named."""
    from relibra.routing.readers import iterate_routes

    for piece in iterate_routes(path, num_experts):
        if group is None:
            yield piece
            continue
        if group not in piece.group_names:
            raise TraceError(f"{path} has no group {group!r}: its groups are {list(piece.group_names)}")
        wanted = {g for g, name in enumerate(piece.group_names) if name == group}
        yield piece.select([s for s, g in enumerate(piece.group_ids.tolist()) if g in wanted])


def _rank_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers of ranks like 8,16,32", param_hint="--ranks")
    return list(dict.fromkeys(map(int, parts)))
