"""Text for a terminal: numbers with their nouns, wrapped sentences, progress."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from relibra.environment import has_columns
from relibra.printable import printable, printable_lines

UNLIMITED = 100_000
"""Columns of a file or pipe."""


def stdout_console() -> Console:
    """Return the console of stdout; in a file or pipe nothing is wrapped or left out, unless COLUMNS gives a width."""
    console = Console()
    return console if console.is_terminal or has_columns() else Console(width=UNLIMITED)


def progress(words: str) -> Status:
    """Show a spinner with a message on stderr while the `with` block runs."""
    return Console(stderr=True).status(escape(printable(words)))


def print_wrapped(text: str) -> None:
    """Print a sentence, wrapped between words at the width of the terminal."""
    stdout_console().print(printable(text), highlight=False, markup=False)


def print_text(text: str) -> None:
    """Print lines of a result on stdout."""
    typer.echo(printable_lines(text))


def print_note(text: str) -> None:
    """Print a line on stderr, beside the results on stdout."""
    typer.echo(printable(text), err=True)
