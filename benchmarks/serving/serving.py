"""Serving with attention and experts on separate processes: exchange, ping-pong, and against transformers.

The exchange (`m2n.py`) carries 256 KB per pair. Ping-pong: one attention and one expert process, a core each, decode
with 1, 2 and 3 micro-batches of 64 requests each, in turns. Batch 64: the same two processes, and continuous batching
of transformers with two threads, in turns. Rows go to results/serving.json.
Run: relibra bench serving [--quick] [--json] [--output FOLDER]. Five minutes on two cores that do nothing else.
--quick takes fewer calls and rounds, and writes no rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.serving.decoding import ANSWER, PROMPT, BenchModel, ContinuousBatching, Driver, percentiles, prompts
from benchmarks.serving.m2n import Pattern, measure, summary
from relibra.rl.model.sharding import quiet_loading
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout

PAIR_BYTES = 256 << 10
PATTERNS = ((1, 1), (2, 2), (4, 4))
MICRO_BATCH = 64
"""Requests of one micro-batch where ping-pong is measured."""
BATCH = 64
TARGETS = {"p50": 1.5, "p99": 2.0, "ping-pong": 1.5, "transformers": 1.0}


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    calls, rounds = (100, 1) if options.quick else (1000, 5)
    rows = [row for pattern in PATTERNS for row in _exchange_rows(*pattern, calls)]
    model = BenchModel()
    with tempfile.TemporaryDirectory() as folder, quiet_loading():
        model.write(Path(folder))
        rows += _ping_pong_rows(Path(folder), model, rounds)
        rows += _transformers_rows(Path(folder), model, rounds)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(", ".join(f"{key} {value}" for key, value in row.items() if key not in ("label", "seed")))
    if not options.quick:
        print(write_results("serving", rows, "relibra bench serving", options.output), file=sys.stderr)


def _exchange_rows(attention: int, experts: int, calls: int) -> list[dict[str, Any]]:
    rows = []
    for transport in ("shared", "tcp"):
        found = measure(
            Pattern(attention=attention, experts=experts, pair_bytes=PAIR_BYTES, transport=transport, calls=calls)
        )
        own, gloo = summary(found["m2n"]), summary(found["gloo"])
        bytes_per_call = 2 * attention * experts * PAIR_BYTES
        rows.append(
            {
                "case": f"M2N {attention} x {experts}, {transport}",
                "label": "measured",
                "seed": 0,
                "repetitions": calls,
                "ratio": _rounded(gloo["p50_ms"] / own["p50_ms"]),
                "ratio_p99": _rounded(gloo["p99_ms"] / own["p99_ms"]),
                "target": f"{TARGETS['p50']:g}, {TARGETS['p99']:g}",
                **{name: _rounded(value) for name, value in own.items()},
                **{f"baseline_{name}": _rounded(value) for name, value in gloo.items()},
                "gb_per_second": _rounded(bytes_per_call / own["p50_ms"] / 1e6),
                "group_creations": found["group_creations"],
                "configuration": f"{PAIR_BYTES >> 10} KB per pair and direction, there and back, {attention + experts} "
                "processes; baseline: gloo, barrier per call, staging at both ends, groups of 8",
            }
        )
    return rows


def _ping_pong_rows(folder: Path, model: BenchModel, rounds: int) -> list[dict[str, Any]]:
    """Rows of 1, 2 and 3 micro-batches of the same size, which take turns."""
    counts = (1, 2, 3)
    with ExitStack() as stack:
        drivers = {m: Driver(stack.enter_context(_workers(folder, m, m * MICRO_BATCH))) for m in counts}
        for m, driver in drivers.items():
            driver.run(prompts(m * MICRO_BATCH))
        found: dict[int, list] = {m: [] for m in counts}
        for _ in range(rounds):
            for m, driver in drivers.items():
                found[m].append(driver.run(prompts(m * MICRO_BATCH)))
    speeds = {m: [one.tokens / one.seconds for one in found[m]] for m in counts}
    return [
        {
            "case": f"{m} micro-batches" if m > 1 else "1 micro-batch",
            "label": "measured",
            "seed": 0,
            "repetitions": rounds,
            "ratio": _rounded(statistics.median(a / b for a, b in zip(speeds[m], speeds[1], strict=True))),
            "target": TARGETS["ping-pong"] if m == 2 else None,
            **{name: _rounded(value) for name, value in percentiles(found[m]).items()},
            "tokens_per_second": _rounded(statistics.median(speeds[m])),
            **quartiles(speeds[m], "tokens_per_second"),
            "configuration": f"{model}; {MICRO_BATCH} requests per micro-batch, prompts of {PROMPT}, answers of "
            f"{ANSWER} tokens, one attention and one expert process, a thread each",
        }
        for m in counts
    ]


def _transformers_rows(folder: Path, model: BenchModel, rounds: int) -> list[dict[str, Any]]:
    batch = prompts(BATCH)
    with _workers(folder, 2, BATCH) as workers:
        driver, other = Driver(workers), ContinuousBatching(folder, threads=2)
        first, same = driver.run(batch), other.run(batch)
        equal = sum(a == b for a, b in zip(first.texts, same.texts, strict=True))
        pairs = [(driver.run(batch), other.run(batch)) for _ in range(rounds)]
    speeds = [[one.tokens / one.seconds for one in side] for side in zip(*pairs, strict=True)]
    return [
        {
            "case": f"batch {BATCH} against transformers",
            "label": "measured",
            "seed": 0,
            "repetitions": rounds,
            "ratio": _rounded(statistics.median(a / b for a, b in zip(*speeds, strict=True))),
            "target": TARGETS["transformers"],
            **{name: _rounded(value) for name, value in percentiles([one for one, _ in pairs]).items()},
            "tokens_per_second": _rounded(statistics.median(speeds[0])),
            "baseline_tokens_per_second": _rounded(statistics.median(speeds[1])),
            "equal_answers": equal,
            **quartiles(speeds[0], "tokens_per_second"),
            "configuration": f"{model}; {BATCH} requests at once, prompts of {PROMPT}, answers of {ANSWER} tokens; "
            "one attention and one expert process, 2 micro-batches; baseline: continuous batching of transformers, "
            "2 threads",
        }
    ]


def _workers(folder: Path, micro_batches: int, batch: int) -> RunningWorkers:
    layout = WorkerLayout(micro_batches=micro_batches, max_batch=batch, max_length=256, max_tokens=1024)
    return RunningWorkers(folder, layout, threads=1)


def _rounded(value: float) -> float:
    return round(float(value), 3)


if __name__ == "__main__":
    main()
