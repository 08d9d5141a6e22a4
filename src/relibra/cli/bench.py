"""`relibra bench`: run a program of the checkout's `benchmarks/` folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import relibra

BENCHMARKS = Path(relibra.__file__).parents[2] / "benchmarks"
"""Absent from an installed package; `relibra bench` exists only in a checkout."""


def bench(context: typer.Context) -> None:
    """Run a benchmark program of this checkout: relibra bench NAME [ARGUMENTS]. Without a name: list all.

    Example: relibra bench planner --quick
    """
    # A process of its own: programs set the number of threads before numpy starts, and measure their peak memory.
    done = subprocess.run([sys.executable, str(BENCHMARKS), *context.args], check=False)
    raise typer.Exit(done.returncode)
