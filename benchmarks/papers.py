"""What papers report, beside what our balancers reach in the simulator. Rows go to results/papers.json.

Run: python benchmarks/papers.py [--quick] [--json] [--data FOLDER] [--output FOLDER]
(or: relibra bench papers). Four minutes on one core.
Our figures are events of a model of the machine (`simulated`), the papers' stand in a column of their own (`cited`),
and where they differ a row says why. Loads come from generators with the profiles that papers and recordings have, and
from recorded routes, which are not part of the project. --quick takes smaller cases and writes no rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
os.environ.update(THREADS)  # before numpy starts its threads

import paper_peers as peers  # noqa: E402
import paper_relibra as own  # noqa: E402
from paper_steps import CROSS, RELIBRA  # noqa: E402
from provenance import DATA, RESULTS, write_results  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from relibra.errors import RelibraError  # noqa: E402

FIGURES = {
    "ratio_to_static": "/ static",
    "ratio_to_balanced": "/ Balanced",
    "relibra_over_it": "relibra / it",
    "skew": "skew",
    "value": "value",
    "recompute": "recompute",
    "update": "update",
    "end_to_end": "end to end",
    "rollout_share": "rollout",
    "slow_decoder": "b = 1/512",
    "fed_again": "fed again",
}
"""Columns that hold figures of ours, where a table has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    skipped: list[str] = []
    rows = list(_rows(options.data, options.quick, skipped))
    for what in skipped:
        print(f"skipped: {what}", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        print(write_results("papers", rows, "relibra bench papers", options.output), file=sys.stderr)


def _rows(data: Path, quick: bool, skipped: list[str]) -> Iterator[dict]:
    parts = {
        "ReLibra, throughput": lambda: own.throughput(data, quick, skipped),
        "ReLibra, ablation": lambda: own.ablation(quick),
        "ReLibra, skew and costs": lambda: own.skews_and_costs(quick),
        "UltraEP": lambda: peers.ultraep(quick),
        "FEPLB": lambda: peers.feplb(quick),
        "ForeMoE": lambda: peers.foremoe(quick),
        "T-PPO": lambda: peers.tppo(quick),
    }
    for name, part in parts.items():
        start = time.perf_counter()
        yield from part()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def print_rows(rows: list[dict]) -> None:
    """Print a table per paper and kind: ours, then what is cited, then how many goals are reached."""
    for paper, kind in dict.fromkeys((row["paper"], row["table"]) for row in rows):
        own = [row for row in rows if (row["paper"], row["table"]) == (paper, kind)]
        shown = [key for key in FIGURES if any(row.get(key, "") != "" for row in own)]
        table = Table(title=f"{paper}: {kind}", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        table.add_column("case", overflow="fold", max_width=34)
        for key in shown:
            table.add_column(FIGURES[key], justify="right", max_width=9)
        table.add_column("cited", overflow="fold", max_width=24)
        for row in own:
            figures = [row.get(key, "") for key in shown]
            cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in figures]
            table.add_row(row["case"], *cells, row["cited"])
        Console().print(table)
        print("; ".join(dict.fromkeys(row["unit"] for row in own)), end="\n\n")
    for name, words in ((RELIBRA, "the levers of the paper"), (CROSS, "copies on other nodes too")):
        judged = [row for row in rows if row["ok"] and row["balancer"] == name]
        missed = [row for row in judged if row["ok"] != "yes"]
        print(f"relibra with {words} reaches its goals in {len(judged) - len(missed)} of {len(judged)} rows")
        for row in missed:
            print(f"  not in {row['case']}: {row['why']}")


if __name__ == "__main__":
    try:
        main()
    except RelibraError as error:
        sys.exit(f"error: {error}")
