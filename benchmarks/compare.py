"""Compare two result files: figures that differ by more than a tolerance.

Run: relibra bench compare A.json B.json [--tolerance 0.1] [--json]
Rows are matched by case and configuration. Exit code 1 when anything differs, or when they share no case.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.results_files import Difference, compare, read_results, refuse_strangers
from relibra.printable import printable

TOLERANCE = 0.1


def report(found: list[Difference], rows: int, tolerance: float, *, as_json: bool) -> int:
    """Print what differs and return the exit code."""
    if as_json:
        print(json.dumps([{**asdict(one), "change": one.change} for one in found], indent=1))
        return int(bool(found))
    print(*(printable(str(one)) for one in found), sep="\n", end="\n" if found else "")
    words = f"{len(found)} difference{'s' * (len(found) != 1)}" if found else "nothing differs"
    print(f"{words} beyond {tolerance:.0%}, {rows} rows")
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.tolerance >= 0:
        parser.error(f"--tolerance is {options.tolerance}: it is a share, 0 or more")
    before, after = read_results(options.before), read_results(options.after)
    refuse_strangers(before, after, (str(options.before), str(options.after)))
    return report(compare(before, after, options.tolerance), len(before), options.tolerance, as_json=options.json)
