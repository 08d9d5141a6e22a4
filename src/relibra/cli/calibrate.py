"""`relibra calibrate`: measure this machine and write it as a cluster file, for modelled seconds."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.models import open_model
from relibra.cli.inputs.requests import documented, within
from relibra.cli.inputs.workload import open_cluster
from relibra.cli.outputs.files import check_outputs, writing
from relibra.cli.outputs.terminal import print_result, progress
from relibra.errors import INSTALL_TRAINING, ConfigError
from relibra.planning.budget import DEFAULT_MODEL

if TYPE_CHECKING:
    from relibra.calibration.fit import Calibration


@documented
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("cluster.toml"),
    ranks: Annotated[int | None, within(1, 1024)] = None,
    model: str = DEFAULT_MODEL,
    links_of: str | None = None,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure experts, copies and the exchange between ranks on this machine; write a cluster for plan and compare.

    Each figure is a median over repetitions that alternate between sizes; the slowest rank counts. Two minutes.

    output PATH  File for the cluster, TOML.
    ranks R  Ranks of this machine; default: its GPUs, else 2 processes.
    model NAME  Model whose experts are timed, or HIDDENxWIDTH, such as 2880x2880.
    links_of NAME  With one GPU only: cluster whose links between ranks are taken, as there is no other rank to measure
        with. The file is then labelled model.
    quick  Few sizes and repetitions, to check that it runs.

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
    with progress(f"measuring {machine.description}"):
        found = fit_cluster(measure_machine(job), machine, expert, cited)
    with writing(output):
        write_cluster(output, found.cluster)
    facts = {"written": str(output), **asdict(found)}
    units = {"gemm": "flop/s", "host": "seconds", "exchange": "seconds"}
    print_result(facts if as_json else {**facts, **_tables(found)}, as_json=as_json, units=units)


def _tables(found: Calibration) -> dict[str, object]:
    """Return measurements as rows of median and quartiles, and the fitted line of each link, for a terminal."""
    links = {name: fit for name, fit in (("host", found.host), ("exchange", found.exchange)) if fit is not None}
    lines = [
        {"what": name, "latency_us": 1e6 * fit.link.latency_seconds, "gb_per_second": fit.link.bytes_per_second / 1e9,
         "error": fit.error, "worst_error": fit.worst}
        for name, fit in links.items()
    ]  # fmt: skip
    return {
        "cluster": {name: value for name, value in asdict(found.cluster).items() if not isinstance(value, dict)},
        "gemm": [{"rows": row.rows, **asdict(row.flops_per_second)} for row in found.gemm],
        **{
            name: [{"bytes": size, **asdict(spread)} for size, spread in zip(fit.bytes, fit.seconds, strict=True)]
            for name, fit in links.items()
        },
        "links": lines,
    }
