"""`relibra bench`: measure this machine with the programs of the checkout's `benchmarks/` folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import relibra
from relibra.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure on this machine: planner.")


@app.callback()
def bench() -> None:
    """Measure on this machine; needs a checkout of relibra."""


@app.command()
def planner(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller cases, fewer repetitions; writes no rows.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder with recorded routes; default: shared/data beside the checkout.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the rows; default: benchmarks/results of the checkout.")
    ] = None,
) -> None:
    """Print what the planner reaches beside what it should reach, and write the rows.

    Example: relibra bench planner --quick
    """
    program = Path(relibra.__file__).parents[2] / "benchmarks" / "planner.py"
    if not program.exists():
        raise ConfigError(
            f"{program} is not there: the benchmarks are not part of the installed package, run from a checkout of "
            "relibra (pip install -e .)"
        )
    words = ["--quick"] * quick
    words += [] if data is None else ["--data", str(data)]
    words += [] if output is None else ["--output", str(output)]
    # A process of its own: it fixes the number of threads before numpy starts, and its peak memory is its own.
    raise typer.Exit(subprocess.run([sys.executable, str(program), *words], check=False).returncode)
