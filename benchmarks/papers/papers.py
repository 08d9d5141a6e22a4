"""Figures of papers beside those of our balancers in the simulator. Rows go to results/papers.json.

Run: relibra bench papers [--quick] [--json] [--data FOLDER] [--output FOLDER]. Four minutes on one core.
Our figures are events of a model of the machine (`simulated`), the papers' stand in a column of their own (`cited`),
and where they differ a row says why. Loads come from generators with the profiles that papers and recordings have, and
from recorded routes, which are not part of the project. --quick takes smaller cases and writes no rows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.papers import peer_tables as peers
from benchmarks.papers import relibra_tables as own
from benchmarks.papers.steps import DEFAULT, RELIBRA

FIGURES = {
    "ratio_to_static": "/static",
    "ratio_to_balanced": "/bal.",
    "relibra_over_it": "relibra\n/it",
    "skew": "skew",
    "value": "value",
    "recompute": "recom-\npute",
    "update": "update",
    "end_to_end": "end to\nend",
    "rollout_share": "rollout",
    "slow_decoder": "b =\n1/512",
    "fed_again": "fed\nagain",
}
"""Columns that hold figures of ours, where a table has them."""

LEGEND = {
    "ratio_to_balanced": "/bal.: / Balanced",
    "relibra_over_it": "relibra /it: relibra / this row",
    "rollout_share": "rollout: its share of the iteration",
    "slow_decoder": "b: what a response adds to the time of a decode step, / its fixed time, 0 for value",
    "fed_again": "fed again: earlier response tokens / decoded tokens",
}
"""What short titles mean, where the unit of the table does not say it."""

CASE, CITED, CITED_WIDE = 26, 18, 30
"""Places in a line for what a row is about where room is short, and for what is cited, at least and at most."""


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
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
        print_table(f"{paper}: {kind}", [row for row in rows if (row["paper"], row["table"]) == (paper, kind)])
    for name, words in ((RELIBRA, "the levers of the paper"), (DEFAULT, "what training plans by default")):
        judged = [row for row in rows if row["ok"] and row["balancer"] == name]
        missed = [row for row in judged if row["ok"] != "yes"]
        print(f"relibra with {words} reaches its goals in {len(judged) - len(missed)} of {len(judged)} rows")
        for row in missed:
            print(f"  not in {row['case']}: {row['why']}")


def print_table(title: str, rows: list[dict]) -> None:
    """Print rows to be read in 80 columns: what several share above them, cited words below where there is no room."""
    console = Console()
    shown = [key for key in FIGURES if any(row.get(key, "") != "" for row in rows)]
    figures = [[_figure(row.get(key, "")) for key in shown] for row in rows]
    names = [_name(row) for row in rows]
    shared = list(dict.fromkeys(_shared(row) for row in rows))
    lengths = [
        max(map(len, (*FIGURES[key].split("\n"), *column)))
        for key, column in zip(shown, zip(*figures, strict=True), strict=True)
    ]
    room = console.width - sum(lengths) - 2 * len(shown) - 2
    beside = room - min(CASE, 2 + max(map(len, names))) >= CITED
    cited = min(CITED_WIDE, max(len(row["cited"]) for row in rows)) if beside else 0
    title = f"{title}; {shared[0]}" if len(shared) == 1 and shared[0] else title
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("case", overflow="fold", max_width=max(CASE, room - cited))
    for key in shown:
        table.add_column(FIGURES[key], justify="right", no_wrap=True)
    if beside:
        table.add_column("cited", overflow="fold", max_width=CITED_WIDE)
    above = ""
    for row, name, cells in zip(rows, names, figures, strict=True):
        group = _shared(row) if len(shared) > 1 else ""
        if group not in ("", above):
            table.add_row(f"[bold]{escape(group)}[/bold]")
        above = group
        table.add_row(("  " if group else "") + escape(name), *cells, *[escape(row["cited"])] * beside)
    console.print(f"[italic]{escape(title)}[/italic]", highlight=False)
    console.print(table)
    units = [*dict.fromkeys(row["unit"] for row in rows), *(LEGEND[key] for key in shown if key in LEGEND)]
    console.print("; ".join(units), highlight=False, markup=False)
    for row in rows if not beside else ():
        if row["cited"]:
            console.print(f"cited for {row['case']}: {row['cited']}", highlight=False, markup=False)
    console.print()


def _figure(value: float | int | str) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _shared(row: dict) -> str:
    """Return what a case has in common with those of other balancers."""
    tail = f", {row['balancer']}"
    return row["case"].removesuffix(tail) if row["balancer"] and row["case"].endswith(tail) else ""


def _name(row: dict) -> str:
    return row["balancer"] if _shared(row) else row["case"]
