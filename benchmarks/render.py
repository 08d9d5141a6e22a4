"""Write the tables, figures and picture of the README, docs/reliability.md, docs/results.md and docs/results/*.md.

Run: relibra bench render [--check] [--json]
--check writes nothing and exits with 1 when a page differs from the result files.

    <!-- results: FILE -->                   a table of all rows of FILE.json up to the next <!-- end -->; what the line
                                             under it shares with the table before on the page is "as above"
    <!-- results: FILE/VIEW @ key=value; ... --> a table of the rows with these values; table_columns.py has the views
    <!-- figure: NAME KEY -->                a figure up to the next <!-- end -->, which is the same in all rows
    <!-- figure: NAME KEY @ CASE -->         the same, of the rows of one case
    <!-- figure: NAME KEY @ key=value; ... --> the same, of the rows with these values
    <!-- figure: NAME least:KEY @ ... -->    the smallest of the rows' values; most: the largest; range: from the
                                             smallest to the largest; count: how many rows
    <!-- answer: PAGE -->                    title and first sentence of docs/results/PAGE.md
"""

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.provenance import RESULTS, ROOT
from benchmarks.harness.results_files import Row, read_results
from benchmarks.load_picture import draw_skew
from benchmarks.programs import BY_NAME, recorded_program
from benchmarks.table_columns import COLUMNS, FACTS, Column, Grouped, shown
from relibra.errors import ConfigError
from relibra.files import write_text

PAGES: tuple[Path, ...] = (
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "reliability.md",
    ROOT / "README.md",
)
"""Every page with markers."""

PICTURE = ROOT / "docs" / "skew.svg"

_AGGREGATES: dict[str, Callable[[Iterable[Any]], Any]] = {"least": min, "most": max}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    stale = [
        str(path.relative_to(ROOT)) for path, text in _written_anew() if not path.exists() or path.read_text() != text
    ]
    written = [] if options.check else write_pages()
    if options.json:
        print(json.dumps({"stale": stale, "written": written}))
    elif options.check:
        for page in stale:
            print(f"{page} differs from the result files; write it again with: relibra bench render")
    else:
        print(*written, sep="\n")
    return int(options.check and bool(stale))


def write_pages() -> list[str]:
    """Write all pages and the picture, and return their names; write nothing when one cannot be made.

    raises    ConfigError as `table` and `figure`
    """
    texts = _written_anew()
    for path, text in texts:
        write_text(path, text)
    return [str(path.relative_to(ROOT)) for path, _ in texts]


def _written_anew() -> list[tuple[Path, str]]:
    pages = [(path, rendered(path.read_text())) for path in PAGES]
    return [*pages, (PICTURE, draw_skew(read_results(RESULTS / "balancers_gpt_oss.json")))]


def rendered(page: str) -> str:
    """Return a page with everything between a marker and its `<!-- end -->` made from the result files."""
    origins: list[Origin | None] = [None]

    def written(match: re.Match[str]) -> str:
        text, origin = _table(match[2], match[3], origins[-1])
        origins.append(origin)
        return match[1] + text + match[4]

    page = re.sub(r"(<!-- results: ([\w/]+)(?: @ (.+?))? -->\n).*?(<!-- end -->)", written, page, flags=re.DOTALL)
    page = re.sub(
        r"(<!-- answer: ([\w-]+) -->).*?(<!-- end -->)", lambda m: m[1] + answer(m[2]) + m[3], page, flags=re.DOTALL
    )
    return re.sub(
        r"(<!-- figure: (\w+) (.+?)(?: @ (.+?))? -->).*?(<!-- end -->)",
        lambda m: m[1] + figure(m[2], m[3], m[4]) + m[5],
        page,
        flags=re.DOTALL,
    )


def answer(name: str) -> str:
    """Return a link to docs/results/NAME.md with its title, and the first sentence of that page.

    raises    ConfigError when the page does not begin with a title and a paragraph
    """
    path = ROOT / "docs" / "results" / f"{name}.md"
    page = re.sub(r"<!-- .*? -->", "", rendered(path.read_text()))
    if not (found := re.match(r"# (.+?)\n\n(.+?)(?:\.\s|\n\n)", page, flags=re.DOTALL)):
        raise ConfigError(f"{path}: a page of results begins with '# QUESTION', an empty line and the answer")
    return f"[{found[1]}](results/{name}.md) {' '.join(found[2].split())}."


def figure(name: str, key: str, of: str | None = None) -> str:
    """Return one figure of a result file as text; "(not measured yet)" where there is no such file.

    of        a case, or `key=value` pairs with "; " between them; None: all rows
    raises    ConfigError as `read_results`, when no row has the key, or when rows have different values of it
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "(not measured yet)"
    aggregate, _, of_key = key.rpartition(":")
    rows = read_results(path)
    values = [row[of_key] for row in rows if of_key in row and _is_of(row, of)]
    if aggregate == "count" and _names_keys_of(rows, of_key, of):
        return str(len(values))
    if aggregate == "range" and values:
        return _range(values)
    if aggregate in _AGGREGATES and values:
        return shown(_AGGREGATES[aggregate](values))
    found = {shown(row[key]) for row in rows if key in row and _is_of(row, of)}
    if len(found) != 1:
        of_rows = "" if of is None else f" of case {of!r}"
        raise ConfigError(
            f"figure {key!r}{of_rows} in {path.name} is {sorted(found) or 'not there'}: a figure in prose needs "
            "exactly one value; name a case, or another key"
        )
    return found.pop()


def _pairs(of: str) -> list[tuple[str, str]]:
    """Split "key=value; key=value"."""
    return [(key, value) for key, _, value in (part.partition("=") for part in of.split("; "))]


def _is_of(row: Row, of: str | None) -> bool:
    """Return whether a row has the case, or every `key=value`, of a marker."""
    return of is None or row["case"] == of or all(str(row.get(key)) == value for key, value in _pairs(of))


def _names_keys_of(rows: Sequence[Row], key: str, of: str | None) -> bool:
    """Return whether rows have all keys of a marker, so that a count of 0 is no spelling mistake."""
    keys = {key} | {name for name, _ in (_pairs(of) if of else [])}
    return all(any(name in row for row in rows) for name in keys)


class Origin(NamedTuple):
    """What the line under a table says of the meaning of its figures, and of where they come from."""

    units: str  # empty: each row says its own
    program: str


def table(name: str, of: str | None = None) -> str:
    """Return the table of a marker that is the first one of its page; see `_table`."""
    return _table(name, of, None)[0]


def _table(name: str, of: str | None, before: Origin | None) -> tuple[str, Origin | None]:
    """Return rows of one result file as Markdown, with where they come from underneath, and that in parts.

    Columns that are empty in all rows are left out; those that are the same in all rows stand underneath, and so do
    the facts with which all cells of a column of FACTS begin or end. Without the file, or without such rows, the text
    says so.

    name      FILE or FILE/VIEW, a key of COLUMNS
    of        a case, or `key=value` pairs with "; " between them; None: all rows
    before    of the table before on the page; None: there is none
    raises    ConfigError as `read_results`, or when a row lacks a key that the table shows
    """
    path = RESULTS / f"{name.partition('/')[0]}.json"
    file = f"`benchmarks/results/{path.name}`"
    if not path.exists():
        return f"*Not measured yet: there is no {file}.*\n", None
    rows = [row for row in read_results(path) if _is_of(row, of)]
    if not rows:
        return f"*{file} has no rows with {of}.*\n", None
    columns = COLUMNS[name]
    if isinstance(columns, Grouped):
        titles, lines = _grouped(rows, columns, path.name)
    else:
        titles, lines = _titles(columns), [_cells(row, columns, path.name) for row in rows]
    lines, facts = _facts_apart(titles, lines)
    kept, shared = _differing(titles, lines)
    shared += facts
    if isinstance(columns, Grouped) and columns.over and len(columns.figures) == 1:
        shared.insert(0, f"cells: {_titles(columns.figures)[0]}")
    written = [" | ".join(["", *(line[n] for n in kept), ""]).strip() for line in (titles, *lines)]
    written.insert(1, "|" + "---|" * len(kept))
    origin = _origin(rows, titles)
    return "\n".join([*written, "", _provenance(rows, shared, path.name, origin, before), ""]), origin


def _facts_apart(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Return the lines without the facts that all cells of a column begin or end with, and these facts in words."""
    columns, facts = [list(column) for column in zip(*lines, strict=True)], []
    for n, column in enumerate(columns):
        if titles[n] in FACTS and len(set(column)) > 1:
            parts = [re.split(r"(?<=[,;]) ", cell) for cell in column]
            first = _shared(parts)
            last = _shared([cell[first:][::-1] for cell in parts])
            common = [*parts[0][:first], *parts[0][len(parts[0]) - last :]]
            columns[n] = [" ".join(cell[first : len(cell) - last]).rstrip(",;") for cell in parts]
            facts += [f"{titles[n]} {' '.join(common).rstrip(',;')}"] * bool(common)
    return [list(line) for line in zip(*columns, strict=True)], facts


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """Return with how many equal parts all cells begin; of each cell one part remains."""
    return next(
        (n for n, of_cells in enumerate(zip(*parts, strict=False)) if len(set(of_cells)) > 1),
        min(map(len, parts)) - 1,
    )


def _differing(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[list[int], list[str]]:
    """Return the columns that differ between lines, and the others in words; the first column and single lines stay."""
    values = [list(dict.fromkeys(column)) for column in zip(*lines, strict=True)]
    kept = [n for n, found in enumerate(values) if n == 0 or len(found) > 1 or (len(lines) == 1 and found[0])]
    return kept, [f"{titles[n]} {found[0]}" for n, found in enumerate(values) if n not in kept and found[0]]


def _grouped(rows: Sequence[Row], of: Grouped, file: str) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of a table with one line per group of rows."""
    over = list(dict.fromkeys(_value_of(row, of.over) for row in rows))
    figures = _titles(of.figures)
    titles = [
        f"{value}: {title}" if value and len(figures) > 1 else value or title for value in over for title in figures
    ]
    values: dict[tuple[str, ...], dict[tuple[str, int], list[Any]]] = {}
    for row in rows:
        group = values.setdefault(tuple(_cells(row, of.by, file)), {})
        for n, figure_of in enumerate(_values(row, of.figures, file)):
            group.setdefault((_value_of(row, of.over), n), []).append(figure_of)
    lines = [
        [*by, *(_range(group.get((value, n), [])) for value in over for n in range(len(figures)))]
        for by, group in values.items()
    ]
    return [*_titles(of.by), *titles], lines


def _value_of(row: Row, of: Column | None) -> str:
    """Return what heads the columns of a row; a number needs its key to be understood."""
    if of is None:
        return ""
    value = row[of] if isinstance(of, str) else of[1](row)
    return value if isinstance(value, str) else f"{value} {of if isinstance(of, str) else of[0]}"


def _titles(columns: Sequence[Column]) -> list[str]:
    return [column.replace("_", " ") if isinstance(column, str) else column[0] for column in columns]


def _range(values: Sequence[Any]) -> str:
    """Return the smallest and the largest of some figures as one cell, or the first of some words.

    None is what a run did not reach: "never", beside the figures of the runs that did.
    """
    numbers = [value for value in values if isinstance(value, int | float)]
    reached = bool(numbers) and len(numbers) + list(values).count(None) == len(values)
    cell = " to ".join(dict.fromkeys(map(shown, (min(numbers), max(numbers)) if reached else values[:1])))
    return f"{cell}, or never" if reached and None in values else cell


def _cells(row: Row, columns: Sequence[Column], file: str) -> list[str]:
    return [shown(value) for value in _values(row, columns, file)]


def _values(row: Row, columns: Sequence[Column], file: str) -> list[Any]:
    needed: tuple[Column, ...] = ("repetitions", "dirty", *columns)  # `_provenance` reads the first two
    try:
        return [row[key] if isinstance(key, str) else key[1](row) for key in needed][2:]
    except KeyError as error:
        raise ConfigError(
            f"{file}: the row of case {row['case']!r} lacks {error}, which its table shows: measure it again with "
            f"{row['command']}"
        ) from error


def _origin(rows: Sequence[Row], titles: Sequence[str]) -> Origin:
    """Return the units of rows, and their command, commit and machine; the usual system is left out."""
    first = rows[0]
    dirty = " (uncommitted changes)" if first["dirty"] else ""
    units = [row["unit"] for row in rows if "unit" in row and "unit" not in titles]
    made = f"{_command_in_words(first['command'])} at commit {first['commit'][:12]}{dirty}"
    machine = first["machine"].removesuffix(", Linux x86_64")
    return Origin("; ".join(dict.fromkeys(units)), f"{made}; {machine}")


def _provenance(rows: Sequence[Row], shared: Sequence[str], file: str, origin: Origin, before: Origin | None) -> str:
    """Return the line under a table: label, units, what all rows share, repetitions, program and file.

    One repetition and a file with the name of its program are left out: docs/results.md says so.
    """
    counts = sorted({row["repetitions"] for row in rows})
    repetitions = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    same = [part for part in Origin._fields if before and getattr(origin, part) == getattr(before, part) != ""]
    facts = [
        *[origin.units or "see each row"] * ("units" not in same),
        *shared,
        *[f"{repetitions} repetitions"] * (repetitions != "1"),
        *[origin.program] * ("program" not in same),
        *[f"`{file}`"] * (file != f"{recorded_program(rows[0]['command'])[0]}.json"),
        *[f"{' and '.join(same)} as above"] * bool(same),
    ]
    return f"*{', '.join(dict.fromkeys(row['label'] for row in rows))}: {'; '.join(facts)}.*"


def _command_in_words(recorded: str) -> str:
    """Return the command that made a row, and the one that makes it today if that is another."""
    name, arguments = recorded_program(recorded)
    today = shlex.join(["relibra", "bench", name, *arguments]) if name in BY_NAME else recorded
    return f"`{recorded}`" + (f" (today `{today}`)" if today != recorded else "")
