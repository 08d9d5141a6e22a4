"""Write and read a trace far larger than memory should be: peak memory and speed. Rows go to results/streaming.json.

Run: python benchmarks/streaming.py [MILLION_ROWS]   (384 MB of disk per million rows)
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from provenance import write_results

from relibra import Demand, iterate_trace
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import concatenate
from relibra.routing.trace_files import TraceWriter

SEED = 0
PIECE_ROWS = 1 << 17


def main() -> None:
    million_rows = float(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder:
        rows = [_measured(step, folder, million_rows) for step in ("write", "read")]
    print(write_results("streaming", rows))


def _measured(step: str, folder: str, million_rows: float) -> dict:
    """Run one step in a process of its own, so that its peak memory is its own."""
    command = [sys.executable, __file__, "--step", step, folder, str(million_rows)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows, seconds, peak_mib = map(float, out.split())
    return {
        "case": {"write": "write in pieces", "read": "read in pieces and count"}[step],
        "label": "measured",
        "unit": "seconds; GB/s of expert ids; peak resident memory of the process in MiB",
        "million_rows": round(rows / 1e6, 1),
        "seconds": round(seconds, 1),
        "gb_per_second": round(rows * 48 * 8 / seconds / 1e9, 2),
        "peak_mib": round(peak_mib),
        "seed": SEED,
        "repetitions": 1,
        "configuration": f"48 layers x 8 of 128 experts, pieces of {PIECE_ROWS:,} rows, SHA-256 and every row checked",
    }


def _step(step: str, folder: str, million_rows: float) -> None:
    start = time.perf_counter()
    if step == "write":
        shape = TraceShape(rows_per_sample=[1024] * (PIECE_ROWS // 8 // 1024), num_layers=48, num_experts=128, top_k=8)
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        _step(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
