"""Text for a terminal: tables, wrapped sentences, progress."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

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


def new_table(*columns: str, left: int = 1, space: int = 2) -> Table:
    """Return a table without lines.

    columns   titles; the first `left` columns are aligned left, the others right
    space     between columns
    """
    table = Table(box=None, padding=(0, space, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(columns):
        table.add_column(title, justify="left" if number < left else "right", no_wrap=True)
    return table


def print_wrapped(*sentences: str) -> None:
    """Print sentences that are not empty, each wrapped between words at the width of the terminal."""
    for sentence in filter(None, sentences):
        stdout_console().print(printable(sentence), highlight=False, markup=False)


def print_text(text: str) -> None:
    """Print lines of a result on stdout."""
    typer.echo(printable_lines(text))


def print_note(text: str) -> None:
    """Print a line on stderr, beside the results on stdout."""
    typer.echo(printable(text), err=True)
