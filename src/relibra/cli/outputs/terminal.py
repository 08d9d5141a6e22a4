"""Results as JSON or as lines and tables, notes and progress."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from relibra.environment import has_columns
from relibra.printable import printable, printable_lines

UNLIMITED = 100_000
"""Columns of a file or pipe."""


def progress(label: str) -> Status:
    """Show a spinner with a label on stderr while the `with` block runs."""
    return Console(stderr=True).status(escape(printable(label)))


def print_result(
    facts: Mapping[str, object],
    *,
    as_json: bool,
    columns: Mapping[str, Sequence[str]] | None = None,
    units: Mapping[str, str] | None = None,
) -> None:
    """Print a result as one JSON object, or its numbers and texts as lines and its lists of mappings as tables.

    Floats have four digits, from 1e4 to 1e9 no fraction. Empty or None fields are left out; None in a table is "-".

    columns    of tables by name, where JSON has more of them
    units      of fields by name, where names do not end in them
    """
    if as_json:
        typer.echo(json.dumps(facts))
        return
    lines: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{key}, {units[key]}" if units and key in units else key
        if rows := rows_of(value):
            _print_lines(lines)
            lines = {}
            typer.echo(f"{name.replace('_', ' ')}:")
            print_table(rows, (columns or {}).get(key))
        elif value is not None and value not in ("", [], {}, ()):
            lines[name] = format_value(value)
    _print_lines(lines)


def rows_of(value: object) -> list[Mapping[str, object]]:
    """Return the rows of a table: a list of mappings, or a mapping of mappings, whose names come first; else none."""
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        return [{"": name, **row} for name, row in value.items()]
    if isinstance(value, list | tuple) and all(isinstance(row, Mapping) for row in value):
        return list(value)
    return []


def format_value(value: object) -> str:
    """Return a value as text, in one line.

    >>> format_value(1234567), format_value(12345.6), format_value(0.123456), format_value({"a": True, "b": None})
    ('1,234,567', '12,346', '0.1235', 'a yes')
    """
    if isinstance(value, bool) or value is None:
        return "yes" if value else "no" if value is False else "-"
    if isinstance(value, Mapping):
        known = {name: item for name, item in value.items() if item is not None and item != ""}
        return ", ".join(f"{str(name).replace('_', ' ')} {format_value(item)}" for name, item in known.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    if isinstance(value, int) or (isinstance(value, float) and 1e4 <= abs(value) < 1e9):
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None) -> list[str]:
    """Print rows with a column for each of their fields, or for some; return the names of those that are printed.

    The last columns are left out where a terminal has no room for them. In a file or pipe nothing is wrapped or left
    out, unless COLUMNS gives a width.
    """
    names = list(columns or dict.fromkeys(name for row in rows for name in row))
    shown, console = names.copy(), Console()
    if not (console.is_terminal or has_columns()):
        console = Console(width=UNLIMITED)
    unlimited = console.options.update(width=UNLIMITED)
    while len(shown) > 1 and console.measure(_table(rows, shown), options=unlimited).minimum > console.width:
        shown.pop()
    console.print(_table(rows, shown))
    if missing := names[len(shown) :]:
        print_text(f"no room for {', '.join(missing).replace('_', ' ')} (--json has all)")
    return shown


def _table(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> Table:
    """Return a table in which only texts behind the first column are wrapped."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    cells = {name: [format_value(row.get(name)) for row in rows] for name in names}
    for number, name in enumerate(names):
        is_text = any(_is_text(row.get(name)) for row in rows)
        title = fill(name.replace("_", " "), max([6, *map(len, cells[name])]), break_long_words=False)
        wraps, widest = is_text and number > 0, max(map(len, [*title.split("\n"), *cells[name]]))
        least = None if wraps else widest
        side: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(title, justify=side, no_wrap=not wraps, min_width=least, overflow="fold")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _is_text(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, str) and not value[:1].isdigit())


def print_text(text: str) -> None:
    """Print lines of a result on stdout."""
    typer.echo(printable_lines(text))


def print_note(text: str) -> None:
    """Print a line on stderr, beside the results on stdout."""
    typer.echo(printable(text), err=True)


def _print_lines(lines: Mapping[str, str]) -> None:
    wide = max(map(len, lines), default=0)
    for name, text in lines.items():
        typer.echo(f"{name.replace('_', ' '):<{wide}}  {text}")
