"""Speed of counting, checking, writing and reading routes on one core. Rows go to results/routing.json.

Run: python benchmarks/routing.py
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from provenance import write_results

from relibra import iterate_trace, write_trace
from relibra.routing.demand import count_token_slots
from relibra.routing.synthetic import TraceShape, domain_trace

REPETITIONS = 7
SEED = 0


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shape = TraceShape(rows_per_sample=[512] * 64, num_layers=48, num_experts=128, top_k=8)
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
        rows = [_row(name, work, trace.experts_TLK.size) for name, work in cases.items()]
    print(write_results("routing", rows))


def _row(name, work, entries) -> dict:
    work()  # compile, warm caches
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    rates = sorted(entries / s / 1e6 for s in seconds)
    return {
        "case": name,
        "label": "measured",
        "unit": "million (token, layer, choice) entries per second, one core",
        "median": round(statistics.median(rates), 1),
        "min": round(rates[0], 1),
        "max": round(rates[-1], 1),
        "seed": SEED,
        "repetitions": REPETITIONS,
        "configuration": "32,768 rows x 48 layers x 8 of 128 experts",
    }


if __name__ == "__main__":
    main()
