"""Import recordings of engines and frameworks: bytes per second on one core, and peak memory. Rows go to
results/route_import.json.

A batch of verl in safetensors, and answers of vLLM with routes as base64 of `.npy`: read, every id checked, made into
pieces of a trace; and the same with the trace written, as `relibra trace import` does.
Run: relibra bench route_import [--quick] [--json] [--output FOLDER]. Two minutes; 2 GB of disk.
--quick takes a small recording, once, and writes no rows.
"""

import argparse
import base64
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.programs import command
from relibra.routing.readers.formats import Format, ImportRules, import_samples
from relibra.routing.readers.formats.normalise import ImportCounts, iterate_pieces
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace_files import TraceWriter

SEED, REPETITIONS = 0, 5
LAYERS, EXPERTS, TOP_K, TOKENS, PROMPT = 48, 128, 8, 4096, 256
SAMPLES, QUICK_SAMPLES = 256, 4
FILES = {Format.VERL: "batch.safetensors", Format.ANSWERS: "answers.jsonl"}
CASES = {
    Format.VERL: "safetensors, int16 (verl)",
    Format.ANSWERS: "base64 of .npy, uint8 (vLLM)",
}
TARGETS = {Format.VERL: 1.0, Format.ANSWERS: 0.3}
"""GB/s of the file, read and checked."""


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("--step", nargs=3, metavar=("FORMAT", "FILE", "TRACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        _step(Format(options.step[0]), Path(options.step[1]), options.step[2])
        return
    samples, repetitions = (QUICK_SAMPLES, 1) if options.quick else (SAMPLES, REPETITIONS)
    rows = measured(samples, repetitions)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(
                f"{row['case']}: {row['gb_per_second']} GB/s ({row['gb_per_second low']:.2f} to "
                f"{row['gb_per_second high']:.2f}) of {row['gigabytes']} GB, peak {row['peak_mib']} MiB"
            )
    if not options.quick:
        print(write_results("route_import", rows, "relibra bench route_import", options.output), file=sys.stderr)


def measured(samples: int, repetitions: int) -> list[dict]:
    """Read each recording without and with writing a trace, in turns; one row for each."""
    found: dict[tuple[Format, bool], list[tuple[float, float]]] = {}
    sizes: dict[Format, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for format, file in FILES.items():
            write_recording(format, folder / file, samples)
            sizes[format] = (folder / file).stat().st_size
        for repetition in range(repetitions):
            for format, file in FILES.items():
                for writes in (False, True):
                    to = str(folder / f"trace-{format.value}-{repetition}") if writes else ""
                    found.setdefault((format, writes), []).append(_run(format, folder / file, to))
    return [_row(format, writes, outcomes, sizes[format]) for (format, writes), outcomes in found.items()]


def write_recording(format: Format, path: Path, samples: int) -> None:
    """Write a recording as the released code of its format does; samples repeat a few drawn ones."""
    shape = TraceShape(rows_per_sample=[TOKENS - 1] * 4, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    trace = domain_trace(shape, np.random.default_rng(SEED))
    drawn = [trace.experts_TLK[trace.sample_rows(s)] for s in range(4)]
    if format is Format.VERL:
        routes = np.zeros((samples, TOKENS, LAYERS, TOP_K), dtype=np.int16)
        for s in range(samples):
            routes[s, : TOKENS - 1] = drawn[s % 4]
        ones = np.ones((samples, TOKENS), dtype=np.int64)
        save_file({"routed_experts": routes, "attention_mask": ones, "responses": ones[:, PROMPT:].copy()}, str(path))
        return
    with path.open("w") as file:
        for s in range(samples):
            held = io.BytesIO()
            np.save(held, drawn[s % 4].astype(np.uint8))
            choice = {
                "index": 0,
                "token_ids": list(range(TOKENS - PROMPT)),
                "routed_experts": base64.b64encode(held.getvalue()).decode(),
            }
            answer = {"prompt_token_ids": list(range(PROMPT)), "choices": [choice]}
            file.write(json.dumps(answer) + "\n")


def _run(format: Format, path: Path, to: str) -> tuple[float, float]:
    """Import in a process of its own on one core, so that its peak memory is its own; return seconds and MiB."""
    words = command("route_import", "--step", format.value, str(path), to)
    out = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, peak_mib = map(float, out.split())
    return seconds, peak_mib


def _row(format: Format, writes: bool, outcomes: list[tuple[float, float]], size: int) -> dict:
    speeds = [size / seconds / 1e9 for seconds, _ in outcomes]
    return {
        "case": CASES[format] + (", trace written" if writes else ""),
        "label": "measured",
        "unit": "GB/s of the file, median, in one process on one core, file in the page cache; MiB: peak resident "
        "memory of the process, of which the file, where it is mapped, is a part",
        "gigabytes": round(size / 1e9, 2),
        "gb_per_second": round(statistics.median(speeds), 2),
        **quartiles(speeds, "gb_per_second"),
        "target": None if writes else TARGETS[format],
        "peak_mib": round(max(peak for _, peak in outcomes)),
        "seed": SEED,
        "repetitions": len(outcomes),
        "configuration": f"samples of {TOKENS:,} tokens, {LAYERS} layers x {TOP_K} of {EXPERTS} experts",
    }


def _step(format: Format, path: Path, to: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rules = ImportRules(num_experts=EXPERTS, layers=tuple(range(LAYERS)))
    small = path.with_name(f"warm-{os.getpid()}-{path.name}")
    write_recording(format, small, 1)  # compiles, or loads what was compiled
    for _ in iterate_pieces(import_samples([small], format, rules), rules, ImportCounts(), source="warm-up"):
        pass
    small.unlink()
    start = time.perf_counter()
    pieces = iterate_pieces(import_samples([path], format, rules), rules, ImportCounts(), source=format.value)
    if to:
        with TraceWriter(to) as writer:
            for piece in pieces:
                writer.append(piece)
    else:
        for _ in pieces:
            pass
    print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
