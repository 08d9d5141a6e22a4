"""Acceptance of the running server: answers, lost workers, computing times, overlap and exchange, against their goals.

Run: relibra bench acceptance [--quick] [--json] [--output FOLDER]. A quarter of an hour on two cores that do nothing
else. Key test has the number of the acceptance test. Rows go to results/acceptance.json. --quick takes fewer cases and
writes no rows.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from benchmarks.deployment.rows import row
from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.serving.decoding import PROMPT, BenchModel, Driver, prompts
from benchmarks.serving.m2n import Pattern, measure, summary
from benchmarks.serving.sleeping import SleepingDeployment
from benchmarks.serving.whole_model import TinyModel, largest_difference, seconds_to_end_after
from relibra.planning.deployment.pipeline_time import StageSeconds
from relibra.rl.model.sharding import quiet_loading
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout

TABLE, MEASURED = "tests", "measured"
LENGTHS = (5, 9, 20, 2, 7, 31)
STEPS = 64
TOLERANCE = 1e-5
JUDGED_BYTES = 256 << 10
"""Bytes per pair for which the exchange has goals: the size that the paper calls typical."""
EXCHANGE_BYTES = int(3.5e10)
"""Bytes that a pattern moves at most, all calls together: large messages get fewer calls."""


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    with quiet_loading():
        rows = list(rows_of(options.quick))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for one in rows:
            print(f"{one['test']:>3}  {one['case']}: {one['value']:.4g}  {one['goal']}  {one['ok']}")
    if not options.quick:
        print(
            write_results("acceptance", rows, "relibra bench acceptance", options.output),
            file=sys.stderr,
        )


def rows_of(quick: bool) -> Iterator[dict]:
    """Yield every row."""
    yield from answers(quick)
    yield from rare_cases()
    yield from computing_times(quick)
    yield from overlap(quick)
    yield from exchanges(quick)


def answers(quick: bool) -> Iterator[dict]:
    """Compare the answers of layouts with those of the whole model (test 1)."""
    cases = [(1, 1, 4, 1), (2, 3, 8, 2), (3, 2, 8, 4), (4, 3, 7, 2), (1, 4, 8, 4), (4, 5, 5, 3)]
    for attention, workers, experts, top_k in cases[: 2 if quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            model = TinyModel(experts=experts, top_k=top_k).write(Path(folder))
            found = []
            for m in (1, 2, 3, 4):
                layout = tiny_layout(attention=attention, experts=workers, micro_batches=m)
                found.append(largest_difference(model, Path(folder), layout, LENGTHS, 8 if quick else STEPS))
        yield row(
            TABLE, f"{attention} attention, {workers} expert workers; {top_k} of {experts} experts", max(found), test=1,
            label=MEASURED, unit="largest difference of log-probs to the whole model", most=TOLERANCE,
            configuration=f"1 to 4 micro-batches, prompts of {min(LENGTHS)} to {max(LENGTHS)}, {STEPS} greedy tokens "
            "that are all equal; all log-probs of the vocabulary; random Qwen3-MoE of 2 layers, float32",
        )  # fmt: skip


def rare_cases() -> Iterator[dict]:
    """Experts without rows, one expert with all, fewer requests than micro-batches, a killed worker (test 2)."""
    unit = "largest difference of log-probs to the whole model"
    cases = (
        ("experts without rows", TinyModel(top_k=1), {"experts": 8, "micro_batches": 2}, (4,)),
        ("all rows at one expert", TinyModel(top_k=1, one_expert=True), {"experts": 4, "micro_batches": 2}, LENGTHS),
        ("fewer requests than micro-batches", TinyModel(), {"experts": 2, "micro_batches": 4}, (4, 11)),
    )
    for name, tiny, sizes, lengths in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny.write(Path(folder))
            found = largest_difference(model, Path(folder), tiny_layout(**sizes), lengths, STEPS)
        yield row(TABLE, name, found, test=2, label=MEASURED, unit=unit, most=TOLERANCE, configuration=str(sizes))
    for name, spare, goal in (("without copies", 0, "ends with a sentence"), ("with copies", 4, "is answered")):
        with tempfile.TemporaryDirectory() as folder:
            TinyModel().write(Path(folder))
            layout = tiny_layout(experts=2, spare_experts=spare, timeout=10.0)
            with RunningWorkers(Path(folder), layout) as workers:
                seconds, sentence = seconds_to_end_after(workers, workers.expert_workers[1].process.kill, 256)
        as_said = bool(sentence) != bool(spare)
        yield row(
            TABLE, f"expert worker killed, {name}", seconds if as_said else float("inf"), test=2, label=MEASURED,
            unit="seconds to the end of the request", most=layout.timeout,
            configuration=f"a request under way {goal}; 2 expert workers, time-out {layout.timeout:g} s",
        )  # fmt: skip


def computing_times(quick: bool) -> Iterator[dict]:
    """Fit lines to the times of attention and experts over requests of a batch, for few and many experts (test 12)."""
    batches = (16, 64) if quick else (16, 32, 48, 64, 96, 128)
    repetitions = 1 if quick else 5
    for experts in (4, 16):
        model = BenchModel(experts=experts)
        seconds_2X = _seconds_of_batches(model, batches, repetitions)
        rows = [b * model.top_k // experts for b in (batches[0], batches[-1])]
        for name, seconds_X in zip(("attention", "experts"), seconds_2X, strict=True):
            listed = ", ".join(f"{b}: {1e3 * s:.2f} ms" for b, s in zip(batches, seconds_X, strict=True))
            yield row(
                TABLE, f"line through times of {name}, {rows[0]} to {rows[1]} rows per expert",
                float(np.corrcoef(batches, seconds_X)[0, 1] ** 2), test=12,
                label=MEASURED, unit="R^2", least=0.99, cited="0.997 (arXiv 2512.21487)",
                configuration=f"{model}; {batches[0]} to {batches[-1]} requests, contexts from {PROMPT}, median of "
                f"{repetitions}; a layer takes {listed}",
            )  # fmt: skip


def _seconds_of_batches(model: BenchModel, batches: Sequence[int], repetitions: int) -> Float64[ndarray, "2 X"]:
    """Return the median seconds of a layer for attention and for experts, by requests of the batch."""
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        layout = WorkerLayout(micro_batches=1, max_batch=max(batches), max_length=256, max_tokens=1024)
        with RunningWorkers(Path(folder), layout) as workers:
            driver = Driver(workers)
            driver.run(prompts(max(batches)))
            found = [[driver.seconds_of_layer(b, model.layers) for b in batches] for _ in range(repetitions)]
    return np.median(np.array(found), axis=0).T


def overlap(quick: bool) -> Iterator[dict]:
    """Compare sleeping deployments with the simulator (test 13), and 3 micro-batches with 1 (test 14)."""
    steps, groups = 4 if quick else 12, 0
    for attention, experts in ((2, 2), (2, 4), (4, 2)):
        one = SleepingDeployment(
            attention=attention, experts=experts, micro_batches=2, stage=StageSeconds(0.016, 0.008, 0.004), steps=steps
        )
        seconds, made = one.measured()
        groups += made
        yield row(
            TABLE, f"simulator and channels, {attention} x {experts}", seconds / one.simulated(), test=13,
            label=MEASURED, unit="time of a step / simulated", least=0.9, most=1.1,
            configuration=f"sleeps for computing and network: {one.stage.attention:g} s of attention, "
            f"{one.stage.experts:g} s of experts per message, {one.stage.hop:g} s one way; {one.layers} layers, "
            f"{one.micro_batches} micro-batches; shared memory, a process per node",
        )  # fmt: skip
    stage = StageSeconds(0.02, 0.02, 0.006)
    paces = {}
    for m in (1, 3):
        one = SleepingDeployment(attention=1, experts=1, micro_batches=m, stage=stage, steps=steps)
        seconds, made = one.measured()
        groups += made
        paces[m] = m / seconds
    yield row(
        TABLE, "3 micro-batches / 1, hop / computing 0.3", paces[3] / paces[1], test=14, label=MEASURED,
        unit="throughput / throughput", least=2.3, cited="2.6 at best",
        configuration=f"sleeps as above: {stage.attention:g} s on both sides, {stage.hop:g} s one way",
    )  # fmt: skip
    yield row(
        TABLE, "groups made", groups, test=16, label=MEASURED, unit="counted in all calls",
        most=0, configuration="all processes of tests 13 and 14",
    )  # fmt: skip


def exchanges(quick: bool) -> Iterator[dict]:
    """Compare the channels with gloo over sizes and processes (test 15)."""
    sizes = (2 << 10, JUDGED_BYTES) if quick else (2 << 10, 32 << 10, JUDGED_BYTES, 2 << 20, 8 << 20)
    for nodes, pair_bytes in itertools.product((2,) if quick else (2, 4, 8), sizes):
        call_bytes = 2 * nodes * nodes * pair_bytes
        calls = 50 if quick else min(1000, EXCHANGE_BYTES // call_bytes)
        found = measure(Pattern(attention=nodes, experts=nodes, pair_bytes=pair_bytes, transport="shared", calls=calls))
        own, gloo = summary(found["m2n"]), summary(found["gloo"])
        medians, tails = gloo["p50_ms"] / own["p50_ms"], gloo["p99_ms"] / own["p99_ms"]
        words = f"per pair and direction, there and back; shared memory, {2 * nodes} processes"
        if pair_bytes == JUDGED_BYTES:
            for name, ratio in (("median", medians), ("p99", tails)):
                yield row(
                    TABLE, f"exchange {nodes} x {nodes}, {name}", ratio, test=15, label=MEASURED,
                    unit="gloo / channels",
                    least=1.0, configuration=f"{pair_bytes >> 10} KB {words}", repetitions=calls,
                )  # fmt: skip
        yield row(
            "exchange", f"{nodes} x {nodes}, {pair_bytes >> 10:,} KB", medians, test=15, label=MEASURED,
            unit="median of gloo / of the channels", configuration=words, repetitions=calls, ratio_p99=tails,
            p50_ms=own["p50_ms"], p99_ms=own["p99_ms"], gb_per_second=call_bytes / own["p50_ms"] / 1e6,
        )  # fmt: skip


def tiny_layout(**sizes: int | float) -> WorkerLayout:
    """Return a layout whose prompts are fed in pieces."""
    return WorkerLayout(**{"max_tokens": 16, "max_length": 384, "kv_tokens": 4096, "timeout": 30.0} | sizes)


if __name__ == "__main__":
    main()
