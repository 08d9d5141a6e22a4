"""What the planner reaches beside what it should reach. Rows go to results/planner*.json.

Run: python benchmarks/planner.py [--quick] [--json] [--data FOLDER] [--output FOLDER]
(or: relibra bench planner). Two minutes.
--quick takes smaller cases and writes no rows. The recordings are not part of the project.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import planner_cases as cases
from provenance import DATA, RESULTS, write_results
from rich.console import Console
from rich.table import Table

from relibra.errors import RelibraError

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--whole-step", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.whole_step:
        print(json.dumps(cases.plan_whole_step(options.whole_step)))
        return
    grown, modelled = [], []
    rows = list(_rows(options.data, options.quick, grown, modelled))
    if options.json:
        print(json.dumps([*rows, *grown, *modelled], indent=1))
    else:
        _print(rows)
        _print_modelled(modelled)
    if not options.quick:
        # Where the recordings lie says something of a machine, not of the result.
        command = "relibra bench planner"
        for name, found in (("planner", rows), ("planner_growth", grown), ("planner_model", modelled)):
            print(write_results(name, found, command, options.output), file=sys.stderr)


def _rows(data: Path, quick: bool, grown: list[dict], modelled: list[dict]) -> Iterator[dict]:
    parts = {
        "recorded routes": lambda: cases.recorded(data, quick),
        "synthetic steps": lambda: cases.synthetic(quick),
        "replication solves": lambda: cases.solves(quick),
        "a whole step": lambda: cases.whole_step(Path(__file__), quick, modelled),
        "the exact optimum": lambda: cases.against_milp(quick),
    }
    for name, part in parts.items():
        start = time.perf_counter()
        yield from part()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    grown += cases.growth(quick)
    yield cases.growth_exponent(grown)


def _print(rows: list[dict]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("case", overflow="fold", max_width=44)
    for title in ("ranks", "reached", "target", "ok", "bound"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in rows:
        figures = (one["ranks"], _shown(one["reached"]), _shown(one["target"]), one["ok"], _shown(one["bound"]))
        table.add_row(one["case"], *map(str, figures))
    Console().print(table)
    units = {}
    for one in rows:
        units.setdefault(one["unit"], one["case"].split(",")[0])
    for unit, case in units.items():
        print(f"{case} ...: {unit}")
    missed = sum(one["ok"] == "NO" for one in rows)
    judged = sum(bool(one["ok"]) for one in rows)
    print(f"{judged - missed} of {judged} targets reached")


def _print_modelled(modelled: list[dict]) -> None:
    for one in modelled:
        print(
            f"{one['case']}, by the model: {one['plan']:.3g} s planned, {one['static']:.3g} s static, "
            f"ratio {one['ratio']:.3f}"
        )
    print(
        "rows in seconds and microseconds are medians of this machine: they grow with whatever else it does meanwhile"
    )


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}".rstrip("0").rstrip(".") if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in THREADS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **THREADS})  # numpy reads them at start
    try:
        main()
    except RelibraError as error:
        sys.exit(f"error: {error}")
