"""Acceptance of deployment search and serving simulator, with figures of MegaScale-Infer beside ours. Ten seconds.

Run: relibra bench deployment [--quick] [--json] [--output FOLDER]
Ours are formulas (`model`) and events (`simulated`) with assumed efficiencies, and one time of this machine
(`measured`); what the paper says stands in a column of its own (`cited`), and needs GPUs with RDMA to be measured. Rows
go to results/deployment.json, with the number of the acceptance test in column test. --quick takes fewer cases and
writes no rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.deployment import pipeline, plans
from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results


def rows_of(quick: bool) -> Iterator[dict]:
    """Yield every row."""
    yield from pipeline.formulas(quick)
    yield from pipeline.micro_batches()
    yield from pipeline.transports()
    yield from pipeline.attention_nodes()
    yield from plans.pairs()
    yield from plans.against_colocated(quick)
    yield from plans.transports(quick)
    yield from plans.against_brute_force(quick)
    yield from plans.simulated_nodes(quick)
    yield from plans.copies()
    yield from pipeline.slow_messages(quick)


def print_rows(rows: list[dict]) -> None:
    """Print a table per kind, and how many goals are reached."""
    console = Console()
    for kind in dict.fromkeys(row["table"] for row in rows):
        of_kind = [row for row in rows if row["table"] == kind]
        table = Table(title=f"{kind}: {of_kind[0]['label']}", title_justify="left", box=None, padding=(0, 1))
        for title in ("test", "case", "value", "goal", "ok", "cited"):
            table.add_column(title, justify="right" if title == "value" else "left")
        for row in of_kind:
            table.add_row(str(row["test"]), row["case"], f"{row['value']:.4g}", row["goal"], row["ok"], row["cited"])
        console.print(table)
    judged = [row for row in rows if row["ok"]]
    print(f"{sum(row['ok'] == 'yes' for row in judged)} of {len(judged)} goals are reached")
    for row in judged:
        if row["ok"] == "NO":
            print(f"  not by test {row['test']}, {row['case']}: {row['value']:.4g}, {row['configuration']}")


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    rows = list(rows_of(options.quick))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        print(write_results("deployment", rows, "relibra bench deployment", options.output), file=sys.stderr)
