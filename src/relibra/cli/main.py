"""`relibra`: the verbs, and how errors and interrupts leave the program."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import relibra
from relibra.cli import report, trace, train
from relibra.errors import RelibraError

app = typer.Typer(
    name="relibra",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 an error, told in one sentence; 2 wrong usage; 130 stopped by Ctrl-C.",
)
app.command(name="train")(train.train)
app.command(name="report")(report.report)
app.add_typer(trace.app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relibra {relibra.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Know every expert load of an RL step before the step.

    Record which experts each token takes, replay the choices in training, and see how uneven the load is.

    Try: relibra train run.steps=3 warmup.steps=20
    """


def main() -> None:
    """Run the program; a RelibraError becomes one line on stderr and exit code 1."""
    try:
        app(prog_name="relibra")
    except RelibraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
