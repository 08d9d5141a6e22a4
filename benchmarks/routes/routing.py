"""Speed of counting, checking, writing and reading routes on one core. Rows go to results/routing.json.

Run: relibra bench routing [--quick] [--json] [--output FOLDER]. Seconds.
--quick takes fewer samples and repetitions, and writes no rows.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from relibra import iterate_trace, write_trace
from relibra.routing.demand import count_token_slots
from relibra.routing.synthetic import TraceShape, domain_trace

REPETITIONS = 7
SEED = 0


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = measured(8, 2) if options.quick else measured(64, REPETITIONS)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{row['case']}: {row['median']} ({row['min']} to {row['max']})")
        print(rows[0]["unit"])
    if not options.quick:
        print(write_results("routing", rows, "relibra bench routing", options.output), file=sys.stderr)


def measured(samples: int, repetitions: int) -> list[dict]:
    """Time each kind of work on samples of 512 rows; kinds take turns."""
    shape = TraceShape(rows_per_sample=[512] * samples, num_layers=48, num_experts=128, top_k=8)
    trace = domain_trace(shape, np.random.default_rng(SEED))
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            write_trace(trace, Path(folder) / str(time.perf_counter_ns()))

        write_trace(trace, Path(folder) / "read")
        cases = {
            "histogram per sample": lambda: count_token_slots(trace.experts_TLK, trace.valid_T, trace.offsets, 128),
            "validate every row": trace.validate,
            "write (validate, hash, fsync)": write,
            "read in pieces (hash, validate)": lambda: list(iterate_trace(Path(folder) / "read", max_rows=4096)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for repetition in range(repetitions + 1):
            for name, work in cases.items():
                start = time.perf_counter()
                work()
                if repetition:  # the first one compiles and warms caches
                    seconds[name].append(time.perf_counter() - start)
    configuration = f"{trace.num_rows:,} rows x 48 layers x 8 of 128 experts"
    return [_row(name, found, trace.experts_TLK.size, configuration) for name, found in seconds.items()]


def _row(name: str, seconds: list[float], entries: int, configuration: str) -> dict:
    rates = sorted(entries / one / 1e6 for one in seconds)
    return {
        "case": name,
        "label": "measured",
        "unit": "million (token, layer, choice) entries per second, one core",
        "median": round(statistics.median(rates), 1),
        "min": round(rates[0], 1),
        "max": round(rates[-1], 1),
        "seed": SEED,
        "repetitions": len(rates),
        "configuration": configuration,
    }
