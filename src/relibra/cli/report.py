"""`relibra report`: one HTML page about a run or a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from relibra.cli.trace import visible


def report(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, trace folder, or .npz of expert choices.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON.")] = False,
) -> None:
    """Write a self-contained HTML page: curves and samples of a run, and how evenly its experts were loaded.

    Example: relibra report runs/demo
    """
    from relibra.reporting import write_report

    page = write_report(path, output)
    typer.echo(json.dumps({"report": str(page)}) if as_json else visible(str(page)))
