"""`relibra calibrate`: measure this machine and write it as a cluster file, for modelled seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from relibra.cli.inputs import options
from relibra.cli.inputs.machine import open_cluster
from relibra.cli.inputs.models import open_model
from relibra.cli.outputs.files import check_outputs, writing
from relibra.cli.outputs.terminal import print_text, progress, stdout_console
from relibra.errors import INSTALL_TRAINING, ConfigError
from relibra.planning.budget import DEFAULT_MODEL

if TYPE_CHECKING:
    from relibra.calibration.fit import Calibration, LinkFit, Spread


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="File for the cluster, TOML.")] = Path(
        "cluster.toml"
    ),
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=1024, metavar="R", help="Ranks of this machine; default: its GPUs, else 2 processes."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model whose experts are timed, or HIDDENxWIDTH, such as 2880x2880.")
    ] = DEFAULT_MODEL,
    links_of: Annotated[
        str | None,
        typer.Option(
            "--links-of",
            metavar="NAME",
            help="With one GPU only: cluster whose links between ranks are taken, as there is no other rank to measure "
            "with. The file is then labelled model.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and repetitions, to check that it runs.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure experts, copies and the exchange between ranks on this machine; write a cluster for plan and compare.

    Each figure is a median over repetitions that alternate between sizes; the slowest rank counts. Two minutes.

    Example: relibra calibrate --output cluster.toml --model qwen3-30b-a3b
    """
    inputs = [("--links-of", Path(links_of))] if links_of and links_of.endswith(".toml") else []
    check_outputs([("--output", output)], inputs)
    expert = open_model(model).expert
    cited = None if links_of is None else open_cluster(links_of)
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigError(f"calibrating needs the package {package!r}: {INSTALL_TRAINING}")
    from relibra.calibration.fit import fit_cluster
    from relibra.calibration.measurement import choose_job, describe_machine, measure_machine
    from relibra.cluster import write_cluster

    job = choose_job(ranks, expert, quick=quick)
    if job.ranks == 1 and cited is None:
        raise ConfigError(
            "one GPU has no other rank to exchange with, so links between ranks cannot be measured: name a cluster to "
            "take them from, for example --links-of h100x8"
        )
    if job.ranks > 1 and cited is not None:
        raise ConfigError(f"--links-of {links_of} is for one GPU: with {job.ranks} ranks links are measured")
    machine = describe_machine(job)
    with progress(f"measuring {machine.words}"):
        found = fit_cluster(measure_machine(job), machine, expert, cited)
    with writing(output):
        write_cluster(output, found.cluster)
    if as_json:
        typer.echo(json.dumps({"written": str(output), **asdict(found)}))
    else:
        _print(found, output)


def _print(found: Calibration, output: Path) -> None:
    cluster = found.cluster
    typer.echo(cluster.source)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("what", "size", "median", "quartiles", "unit"):
        table.add_column(title, justify="left" if title in ("what", "unit") else "right", no_wrap=True)
    for row in found.gemm:
        table.add_row("experts", f"{row.rows:,} rows each", *_shown(row.flops_per_second, 1e-9), "Gflop/s")
    table.add_row("large product", "", *_shown(found.dense_flops_per_second, 1e-9), "Gflop/s")
    for what, fit in (("host copies", found.host), ("exchange", found.exchange)):
        if fit is not None:
            for size, seconds in zip(fit.bytes, fit.seconds, strict=True):
                table.add_row(what, f"{size / 1024:,.0f} KiB", *_shown(seconds, 1e3), "ms")
    stdout_console().print(table)
    typer.echo(f"host copies: {_line(found.host)}")
    if found.exchange is not None:
        typer.echo(f"exchange: {_line(found.exchange)}")
        hidden = "hidden behind products" if cluster.hides_copies else "not hidden behind products: ranks wait for them"
        typer.echo(f"copies of experts: {hidden}")
    typer.echo(
        f"peak {cluster.peak_flops_per_second / 1e9:,.1f} Gflop/s per rank, experts reach {cluster.efficiency:.0%} of "
        f"it; memory {cluster.memory_bytes / 1e9:,.1f} GB per rank, read and written at "
        f"{cluster.memory_bytes_per_second / 1e9:,.1f} GB/s"
    )
    print_text(f"{output}: label {cluster.label}; relibra plan TRACE --ranks {cluster.num_ranks} --cluster {output}")


def _shown(spread: Spread, scale: float) -> tuple[str, str]:
    low, median, high = (f"{figure * scale:,.4g}" for figure in (spread.low, spread.median, spread.high))
    return median, f"{low} to {high}"


def _line(fit: LinkFit) -> str:
    return (
        f"alpha {1e6 * fit.link.latency_seconds:,.1f} us per message, 1 / beta "
        f"{fit.link.bytes_per_second / 1e9:,.2f} GB/s; the line is off by {fit.error:.0%} (root mean square), "
        f"{fit.worst:.0%} at worst"
    )
