"""Seconds of a whole simulated step: what training plans by default, beside static, peers and its own other settings.
Rows go to results/step.json.

Cells: rows once per node or once per rank (hierarchical, flat) x 1, 4, 16 mini-batches x 1,024, 2,048, 8,192 tokens per
rank and micro-batch, 32 micro-batches, on 8 simulated H100 (one node: dispatch does not matter), 16 and 32, for both
recordings and the common case: Qwen3-30B-A3B with generated routes, static skew 1.28 on 8 ranks. Three steps with all
layers beside them. Plans know the sizes of the whole model, so slots take the memory that it leaves. Every plan is
simulated, also where it loses to static; live peers decide after the router. The recordings are not part of the
project; the program says so when they are not there.
Run: relibra bench step [--quick] [--cells PATTERN] [--unseen] [--json] [--data FOLDER] [--output FOLDER].
An hour, in two processes. --unseen adds cells that no default was chosen on: 64 ranks, other models, other samples.
--quick: rows once per node, 4 mini-batches of 8,192 tokens; --cells: those whose name has the pattern, such as
"gpt-oss*16 ranks*flat"; both write no rows.
"""

import fnmatch
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.planner.step_cells import RECORDINGS, Cell, lost_once, make_case, matrix, quick, unseen
from benchmarks.planner.step_rows import Row, cells_behind, prediction_order, rows_of

PROCESSES = 2
COLUMNS = {
    "seconds": "seconds",
    "ratio_to_static": "static / it",
    "ratio_to_best_peer": "peer / it",
    "ratio_to_best_own_setting": "own / it",
    "hidden_ratio_to_static": "static / it, exchange hidden",
    "exposed_seconds": "exposed s",
    "slots": "slots",
    "resident": "of layers",
    "slot_gib": "slot GiB",
    "plan_seconds": "plan s",
}


def main() -> None:
    parser = measurement_options(__doc__, data=True)
    parser.add_argument("--cells", metavar="PATTERN", help="only cells whose name has this pattern; writes no rows")
    parser.add_argument("--unseen", action="store_true", help="also cells that no default was chosen on")
    options = parser.parse_args()
    cells = quick() if options.quick else matrix() + lost_once() + (unseen() if options.unseen else [])
    if options.cells:
        cells = [cell for cell in cells if fnmatch.fnmatch(cell.name, f"*{options.cells}*")]
    rows: list[Row] = []
    for found in iterate_rows(cells, options.data):
        rows += found
        print(f"{found[0]['case']}: {len({row['case'] for row in rows})} of {len(cells)} cells", file=sys.stderr)
    rows.append(prediction_order(rows))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not (options.quick or options.cells):
        words = "relibra bench step --unseen" if options.unseen else "relibra bench step"
        print(write_results("step", rows, words, options.output), file=sys.stderr)


def iterate_rows(cells: list[Cell], data: Path) -> Iterator[list[Row]]:
    """Yield the rows of each cell, in order, as soon as they are there; those of missing recordings are left out."""
    missing = {name for name, (file, _) in RECORDINGS.items() if not (data / file).exists()}
    for name in missing & {cell.source for cell in cells}:
        print(f"skipped: {data / RECORDINGS[name][0]} is not there; name its folder with --data", file=sys.stderr)
    there = [cell for cell in cells if cell.source not in missing]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(rows_of_cell, there, repeat(data))


def rows_of_cell(cell: Cell, data: Path) -> list[Row]:
    """Return the rows of a cell; called in a process of its own."""
    return rows_of(make_case(cell, data))


def print_rows(rows: list[Row]) -> None:
    """Print one line per cell and plan, the plans that the default is behind, and the order by prediction."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("case", "plan"):
        table.add_column(column, no_wrap=True)
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    for row in rows:
        if "plan" in row:
            shown = (f"{row[c]:,.3f}" if isinstance(row[c], float) else f"{row[c]:,}" for c in COLUMNS)
            table.add_row(row["case"], row["plan"], *shown)
    console = Console(width=190)
    console.print(table)
    for row in cells_behind(rows):
        console.print(f"behind: {row['case']}: {row['plan']} by {row['ahead']:.1%}", highlight=False)
    for row in rows:
        if "share" in row:
            console.print(f"{row['case']}: {row['share']} of {row['pairs']} pairs, target {row['target']}")


if __name__ == "__main__":
    main()
