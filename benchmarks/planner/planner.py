"""Results of the planner against their targets. Rows go to results/planner*.json.

Run: relibra bench planner [--quick] [--json] [--data FOLDER] [--output FOLDER]. Two minutes.
--quick takes smaller cases and writes no rows. The recordings are not part of the project.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.planner import cases


def main() -> None:
    parser = measurement_options(__doc__, data=True)
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
        "a whole step": lambda: cases.whole_step(quick, modelled),
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
