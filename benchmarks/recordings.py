"""Skew of recorded routes under the static layout. Rows go to results/recordings.json.

The recordings are not part of the project; the program says so and writes nothing when they are not there.
Run: python benchmarks/recordings.py [--quick] [--json] [--data FOLDER] [--output FOLDER]
(or: relibra bench recordings). Seconds. --quick writes no rows.
"""

import argparse
import json
import sys
from pathlib import Path

from provenance import DATA, RESULTS, write_results
from rich.console import Console
from rich.table import Table

from relibra.routing.readers import iterate_routes
from relibra.routing.trace_statistics import survey

CASES = (
    ("gpt_oss_20b_decode_topk.npz", "gpt-oss-20b, decoding"),
    ("deepseek_v2_lite_esft_topk.npz", "DeepSeek-V2-Lite"),
)
TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
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
        print(write_results("recordings", rows, "python benchmarks/recordings.py", options.output), file=sys.stderr)


def _rows(path: Path, name: str) -> list[dict]:
    result = survey(lambda: iterate_routes(path), ranks=[8, 16, 32], micro_batch_tokens=TOKENS)
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


if __name__ == "__main__":
    main()
