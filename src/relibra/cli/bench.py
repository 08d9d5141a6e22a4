"""`relibra bench`: measure this machine with the programs of the checkout's `benchmarks/` folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import relibra
from relibra.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure on this machine: planner, runtime, ranks, gpu, rl, tppo.")

Quick = Annotated[bool, typer.Option("--quick", help="Smaller cases, fewer repetitions; writes no rows.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder with recorded routes; default: shared/data beside the checkout.")
]
Output = Annotated[Path | None, typer.Option(help="Folder for the rows; default: benchmarks/results of the checkout.")]


@app.callback()
def bench() -> None:
    """Measure on this machine; needs a checkout of relibra."""


@app.command()
def planner(quick: Quick = False, data: Data = None, output: Output = None) -> None:
    """Print what the planner reaches beside what it should reach, and write the rows.

    Example: relibra bench planner --quick
    """
    _run("planner.py", quick=quick, data=data, output=output)


@app.command()
def runtime(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """Train by plans beside all_to_all and beside balanced routes, on two processes, and write the rows.

    Example: relibra bench runtime --quick
    """
    _run("runtime.py", quick=quick, as_json=as_json, data=data, output=output)


@app.command()
def ranks(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """Time what each rank of a plan computes, one rank after another: does an even load take even time?

    Example: relibra bench ranks --quick
    """
    _run("emulated_ranks.py", quick=quick, as_json=as_json, data=data, output=output)


@app.command()
def gpu(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """Do the same as `ranks` at real sizes on one CUDA GPU, and time copies beside computing; skips without a GPU.

    Example: relibra bench gpu --quick
    """
    _run("gpu.py", quick=quick, as_json=as_json, data=data, output=output)


@app.command()
def rl(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """Train by RL with experts at their homes and by plans, on two processes: seconds per stage, skew, reward.

    Example: relibra bench rl --quick
    """
    _run("rl.py", quick=quick, as_json=as_json, output=output)


@app.command()
def tppo(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """Train a tiny model with PPO and with T-PPO: decode steps and seconds to the same reward.

    Example: relibra bench tppo --quick
    """
    _run("tppo.py", quick=quick, as_json=as_json, output=output)


def _run(name: str, *, quick: bool, output: Path | None, data: Path | None = None, as_json: bool = False) -> NoReturn:
    """Run a program of the checkout and leave with its exit code.

    raises   ConfigError where relibra is installed without its checkout
    """
    program = Path(relibra.__file__).parents[2] / "benchmarks" / name
    if not program.exists():
        raise ConfigError(
            f"{program} is not there: the benchmarks are not part of the installed package, run from a checkout of "
            "relibra (pip install -e .)"
        )
    words = ["--quick"] * quick + ["--json"] * as_json
    words += [] if data is None else ["--data", str(data)]
    words += [] if output is None else ["--output", str(output)]
    # A process of its own: it fixes the number of threads before numpy starts, and its peak memory is its own.
    raise typer.Exit(subprocess.run([sys.executable, str(program), *words], check=False).returncode)
