"""`relibra`: the verbs, and how errors and interrupts leave the program."""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from collections.abc import Callable
from inspect import getdoc
from typing import Annotated, NoReturn

import typer

import relibra
from relibra.cli import bench, calibrate, compare, explain, export, plan, report, simulate, sweep, trace, train, upcycle
from relibra.cli.serve import app as serve
from relibra.environment import shows_tracebacks
from relibra.errors import RelibraError, library_errors
from relibra.printable import escape_logs_and_tracebacks, printable

app = typer.Typer(
    name="relibra",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names of options in a terminal of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 an error, described in one sentence; 2 wrong usage; 130 stopped by Ctrl-C.",
)
_VERBS: tuple[Callable[..., None], ...] = (
    train.train, export.export, report.report, plan.plan, compare.compare, calibrate.calibrate, explain.explain,
    simulate.simulate, sweep.sweep, upcycle.upcycle,
)  # fmt: skip
for _verb in _VERBS:
    app.command()(_verb)
app.add_typer(trace.app, name="trace", short_help=trace.app.info.help)
app.add_typer(serve.app, name="serve", short_help=serve.app.info.help)
if bench.BENCHMARKS.is_dir():
    everything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name="bench", context_settings=everything)(bench.bench)


def _keep_whole(group: typer.Typer) -> None:
    """Keep the lines of examples as they are, to be copied, and first sentences whole in the list of commands."""
    for command in group.registered_commands:
        first, *others = (getdoc(command.callback) or "").split("\n\n")
        command.short_help = " ".join(first.split())
        kept = [f"\b\n{part}" if part.startswith("Example:") else part for part in others]
        command.help = "\n\n".join([first, *kept])


for _group in (app, trace.app, serve.app):
    _keep_whole(_group)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relibra {relibra.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Balance the experts of a mixture-of-experts model in RL training, from the routes of the rollout.

    Record which experts each token takes, replay the choices in training, measure what uneven load costs, plan steps
    with even load.

    Try: relibra train run.steps=3 warmup.steps=20   (a smoke run, too short to learn)
    """


def main() -> None:
    """Run the program; expected errors become one line on stderr and exit code 1."""
    atexit.register(gc.freeze)  # else the end of a process collects all that torch imported
    escape_logs_and_tracebacks()
    try:
        described = (OSError, RecursionError, MemoryError)  # have a sentence of their own below
        with library_errors(
            f"relibra {' '.join(sys.argv[1:2])}", RelibraError, stays=lambda error: isinstance(error, described)
        ):
            app(prog_name="relibra")
    except RelibraError as error:
        _exit_with(str(error))
    except OSError as error:  # a file that cannot be read, a folder that cannot be written, a name too long
        _exit_with(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except RecursionError:
        _exit_with("an input is nested too deeply")
    except MemoryError as error:
        _exit_with(f"this needs more memory than there is ({str(error) or 'no size known'}): choose smaller inputs")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except SystemExit as leaving:
        if leaving.code == 130:  # typer turns Ctrl-C into this code and prints nothing
            print("stopped", file=sys.stderr)
        raise


def _exit_with(sentence: str) -> NoReturn:
    if shows_tracebacks():
        traceback.print_exc()
    print(f"error: {printable(sentence)}", file=sys.stderr)
    sys.exit(1)
