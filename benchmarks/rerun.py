"""Measure a committed result again and compare the rows within a tolerance.

Run: relibra bench rerun NAME [--row K] [--tolerance 0.1] [--json] [--data FOLDER]
NAME is a file of benchmarks/results. The committed rows stay; exit code 1 when a figure differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import TOLERANCE, report
from benchmarks.harness.provenance import DATA, RESULTS, ROOT, commit
from benchmarks.harness.results_files import Row, compare, read_results
from benchmarks.programs import BY_NAME, command, recorded_program
from relibra.errors import ConfigError, EngineError


def command_of(rows: list[Row], data: Path, output: Path) -> list[str]:
    """Return what to run to get the rows again, with the rows going to another folder.

    raises    ConfigError when rows name several commands, or one that is no benchmark of this checkout
    """
    commands = sorted({row["command"] for row in rows})
    if len(commands) > 1:
        raise ConfigError(f"the rows come from several commands, {'; '.join(commands)}: choose a row with --row")
    name, arguments = recorded_program(commands[0])
    if name not in BY_NAME:
        raise ConfigError(
            f"the rows name the command {commands[0]!r}, which is no benchmark: allowed are relibra bench NAME and "
            "python benchmarks/NAME.py"
        )
    words = command(name, *arguments)
    return [*words, *([] if data == DATA else ["--data", str(data)]), "--output", str(output)]


def chosen(rows: list[Row], number: int | None, name: str) -> list[Row]:
    """Return one row, or all without a number; raises ConfigError when there is no such row."""
    if number is None:
        return rows
    if not 0 <= number < len(rows):
        raise ConfigError(f"--row {number}: {name} has rows 0 to {len(rows) - 1}")
    return [rows[number]]


def rerun(name: str, number: int | None, data: Path) -> tuple[list[Row], list[Row]]:
    """Run the command of committed rows; return those rows and the new ones.

    raises    ConfigError as above; EngineError when the program fails or makes no rows
    """
    rows = read_results(RESULTS / f"{name}.json")
    wanted = chosen(rows, number, name)
    with tempfile.TemporaryDirectory() as folder:
        words = command_of(wanted, data, Path(folder))
        print(
            f"{wanted[0]['command']}: rows of commit {wanted[0]['commit'][:12]}, now at {commit()[:12]}",
            file=sys.stderr,
        )
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise EngineError(f"{wanted[0]['command']} failed with code {done.returncode}: its message stands above")
        path = Path(folder) / f"{name}.json"
        if not path.exists():
            raise EngineError(f"{wanted[0]['command']} made no rows of {name}: what it skipped stands above")
        new = read_results(path)
    return wanted, new if number is None or len(new) != len(rows) else [new[number]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--row", type=int)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    if not options.tolerance >= 0:
        parser.error(f"--tolerance is {options.tolerance}: it is a share, 0 or more")
    old, new = rerun(options.name.removesuffix(".json"), options.row, options.data)
    return report(compare(old, new, options.tolerance), len(old), options.tolerance, as_json=options.json)
