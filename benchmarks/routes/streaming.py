"""Write and read a trace larger than memory: speed and peak memory. Rows go to results/streaming.json.

Run: relibra bench streaming [MILLION_ROWS] [--repetitions N] [--quick] [--json] [--output FOLDER].
Two minutes with ten million rows, three times; 384 MB of disk per million rows.
--quick takes a quarter of a million rows, once, and writes no rows.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.programs import command
from relibra import Demand, iterate_trace
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import concatenate
from relibra.routing.trace_files import TraceWriter

SEED = 0
PIECE_ROWS = 1 << 17
LAYERS, TOP_K = 48, 8
BYTES_PER_ROW = LAYERS * TOP_K


STEPS = {"write": "write in pieces", "read": "read in pieces and count"}


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("million_rows", type=float, nargs="?", default=10.0, metavar="MILLION_ROWS")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        name, folder = options.step
        _step(name, folder, options.million_rows)
        return
    million_rows, repetitions = (0.25, 1) if options.quick else (options.million_rows, options.repetitions)
    rows = measured(million_rows, repetitions)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(
                f"{row['case']}: {row['million_rows']} million rows in {row['seconds']} s ({row['seconds low']:.1f} to "
                f"{row['seconds high']:.1f}), {row['gb_per_second']} GB/s, peak {row['peak_mib']} MiB"
            )
    if not options.quick:
        source = f"relibra bench streaming {million_rows:g} --repetitions {repetitions}"
        print(write_results("streaming", rows, source, options.output), file=sys.stderr)


def measured(million_rows: float, repetitions: int) -> list[dict]:
    """Write and read in turn; one row for each, with medians."""
    found: dict[str, list[tuple[float, float, float]]] = {step: [] for step in STEPS}
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            for step, outcomes in found.items():
                outcomes.append(_run(step, folder, million_rows))
    return [_row(step, outcomes) for step, outcomes in found.items()]


def _run(step: str, folder: str, million_rows: float) -> tuple[float, float, float]:
    """Run one step in a process of its own, so that its peak memory is its own; return rows, seconds, MiB."""
    words = command("streaming", "--step", step, folder, str(million_rows))
    out = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows, seconds, peak_mib = map(float, out.split())
    return rows, seconds, peak_mib


def _row(step: str, outcomes: list[tuple[float, float, float]]) -> dict:
    rows, all_seconds = outcomes[0][0], [seconds for _, seconds, _ in outcomes]
    seconds, size = statistics.median(all_seconds), rows * BYTES_PER_ROW
    return {
        "case": STEPS[step],
        "label": "measured",
        "unit": "seconds, median; GB/s of expert ids; peak resident memory of the process in MiB, the largest",
        "million_rows": round(rows / 1e6, 1),
        "gigabytes": round(size / 1e9, 1),
        "seconds": round(seconds, 1),
        **quartiles(all_seconds, "seconds"),
        "gb_per_second": round(size / seconds / 1e9, 2),
        "peak_mib": round(max(peak for _, _, peak in outcomes)),
        "seed": SEED,
        "repetitions": len(outcomes),
        "configuration": f"{LAYERS} layers x {TOP_K} of 128 experts, pieces of {PIECE_ROWS:,} rows, SHA-256 and every "
        "row checked",
    }


def _step(step: str, folder: str, million_rows: float) -> None:
    start = time.perf_counter()
    if step == "write":
        shape = TraceShape(
            rows_per_sample=[1024] * (PIECE_ROWS // 8 // 1024), num_layers=LAYERS, num_experts=128, top_k=TOP_K
        )
        piece = concatenate([domain_trace(shape, np.random.default_rng(SEED))] * 8)
        start = time.perf_counter()
        with TraceWriter(Path(folder) / "trace") as writer:
            for _ in range(round(million_rows * 1e6 / PIECE_ROWS)):
                writer.append(piece)
        rows = writer.index().rows
    else:
        rows = 0
        for piece in iterate_trace(Path(folder) / "trace", max_rows=PIECE_ROWS):
            Demand.from_trace(piece)
            rows += piece.num_rows
    print(rows, time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
