"""Skew of recorded routes under the static layout. Rows go to results/recordings.json.

The recordings are not part of the project; the program says so and writes nothing when they are not there.
Run: relibra bench recordings [--quick] [--json] [--data FOLDER] [--output FOLDER]. Seconds. --quick writes no rows.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from relibra.routing.readers import iterate_routes
from relibra.routing.trace_statistics import compute_statistics

CASES = (
    ("gpt_oss_20b_decode_topk.npz", "gpt-oss-20b, decoding"),
    ("deepseek_v2_lite_esft_topk.npz", "DeepSeek-V2-Lite"),
)
TOKENS = 2048


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    for file, _ in CASES:
        if not (options.data / file).exists():
            print(f"skipped: {options.data / file} is not there; name its folder with --data", file=sys.stderr)
            return
    rows = [row for file, name in CASES for row in _rows(options.data / file, name)]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
    if not options.quick:
        # Where the recordings lie says something of a machine, not of the result.
        print(write_results("recordings", rows, "relibra bench recordings", options.output), file=sys.stderr)


def _rows(path: Path, name: str) -> list[dict]:
    result = compute_statistics(lambda: iterate_routes(path), ranks=[8, 16, 32], micro_batch_tokens=TOKENS)
    return [
        {
            "case": name,
            "label": "measured",
            "unit": "rank skew, static layout, mean over (micro-batch, layer)",
            "ranks": layout.ranks,
            "median": round(layout.skew_median, 3),
            "mean": round(layout.skew_mean, 3),
            "p95": round(layout.skew_p95, 3),
            "samples": result.samples,
            "seed": None,
            "repetitions": 1,
            "configuration": f"{result.rows:,} tokens, {result.layers} layers, {result.top_k} of {result.experts} "
            f"experts, micro-batches of {TOKENS:,} tokens in recorded order",
        }
        for layout in result.layouts
    ]


def print_rows(rows: list[dict]) -> None:
    """Print a table."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in (columns := ("case", "ranks", "mean", "median", "p95")):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)
    print(rows[0]["unit"])
