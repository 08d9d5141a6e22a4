"""Seconds of the training stages of an iteration: passes, activations, prompts, rollouts ahead and balancers, beside
the settings of other trainers.
Rows go to results/iteration.json.

Cells: 8 simulated H100 on one node, and two nodes with rows once per node and once per rank, x static skew 1.1, 1.3,
1.6 x 1 and 4 mini-batches x prompts and responses of 256 / 4,096 and 1,024 / 3,072 tokens in groups of 16, at the
sizes of Qwen3-30B-A3B with generated routes. Each peer's default and best setting is a row with its source; a peer runs
on the same simulated executor.
Run: relibra bench iteration [--quick] [--cells PATTERN] [--json] [--output FOLDER]. --quick: one node, skew 1.3;
--cells: those whose name has the pattern, such as "16 ranks, flat*"; both write no rows.
"""

import fnmatch
import json
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.simulation.iteration_cells import matrix, quick
from benchmarks.simulation.iteration_rows import Row, rows_of

COLUMNS = ("seconds", "iteration_seconds", "gib", "ratio_to_static", "ratio_to_best_peer", "ratio_to_best_setting")


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("--cells", metavar="PATTERN", help="only cells whose name has this pattern; writes no rows")
    options = parser.parse_args()
    cells = quick() if options.quick else matrix()
    if options.cells:
        cells = [cell for cell in cells if fnmatch.fnmatch(cell.name, f"*{options.cells}*")]
    rows: list[Row] = []
    for number, cell in enumerate(cells, 1):
        rows += rows_of(cell)
        print(f"{cell.name}: {number} of {len(cells)} cells", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not (options.quick or options.cells):
        print(write_results("iteration", rows, "relibra bench iteration", options.output), file=sys.stderr)


def print_rows(rows: list[Row]) -> None:
    """Print one line per cell and plan."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("case", "plan", "passes", "prompts", "ahead"):
        table.add_column(column, no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), justify="right")
    table.add_column("kept", no_wrap=True)
    for row in rows:
        names = (str(row[name]) for name in ("case", "plan", "passes", "prompts", "ahead"))
        table.add_row(
            *names, *(f"{row[name]:,.3f}" for name in COLUMNS), row["kept"] if row["fits"] else "does not fit"
        )
    Console(width=260).print(table)


if __name__ == "__main__":
    main()
