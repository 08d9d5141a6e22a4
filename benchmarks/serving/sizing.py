"""A server sized by measurement: tokens per second that a plan predicts from measured times, and those of the server.

One attention and one expert process, a core each, are measured with one micro-batch, as `relibra serve measure` does.
Then 64, 128 and 256 requests decode in 1 to 4 micro-batches, in turns. Rows go to results/sizing.json.
Run: relibra bench sizing [--quick] [--json] [--output FOLDER]. Eight minutes on two cores that do nothing else.
--quick takes fewer settings and rounds, and writes no rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.deployment.rows import row
from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.serving.decoding import PROMPT, BenchModel, Driver, prompts
from relibra.cli.serve.plan import open_served_model
from relibra.planning.deployment.deployment_plan import DeploymentPlan, Pool
from relibra.planning.deployment.measured_seconds import MeasuredSeconds, fit_line
from relibra.planning.deployment.performance import measured_worker
from relibra.planning.deployment.service_level import ServiceLevel
from relibra.rl.model.sharding import quiet_loading
from relibra.serving.batch_seconds import measure_batches
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout

TABLE, JUDGED_ROWS = "sizing", 8
ANSWER = 32
CONTEXT = PROMPT + ANSWER // 2
BATCHES, MICRO_BATCHES = (64, 128, 256), (1, 2, 3, 4)
NEAR, SETTINGS = 0.15, 10
"""Accepted error of a prediction, and settings of the twelve that have to be within it."""


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    model = BenchModel()
    with tempfile.TemporaryDirectory() as folder, quiet_loading():
        model.write(Path(folder))
        rows = list(rows_of(Path(folder), model, options.quick))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for one in rows:
            print(f"{one['case']}: {one['value']:.4g}  {one['goal']}  {one['ok']}")
    if not options.quick:
        print(write_results("sizing", rows, "relibra bench sizing", options.output), file=sys.stderr)


def rows_of(folder: Path, model: BenchModel, quick: bool) -> Iterator[dict]:
    """Yield lines of the tables, predicted and measured settings, and what they add up to."""
    measured = measure_batches(folder, context=CONTEXT)
    judged = sum(rows < JUDGED_ROWS for rows, _ in measured.expert)
    for name in ("attention", "expert"):
        table = getattr(measured, name)[judged:]
        listed = ", ".join(f"{rows:g}: {1e6 * seconds:.0f} us" for rows, seconds in table)
        yield row(
            TABLE, f"line of {name}, from {JUDGED_ROWS} rows per expert", fit_line(table)[2], label="measured",
            unit="R^2", least=0.99, configuration=f"{model}; {listed}",
        )  # fmt: skip
    ratios, chosen = [], []
    for batch in BATCHES[:1] if quick else BATCHES:
        predicted = {m: _predicted(folder, measured, batch, m) for m in MICRO_BATCHES}
        found = _measured(folder, batch, 1 if quick else 3)
        best = max(predicted, key=lambda m: predicted[m])
        chosen.append(found[best] / max(found.values()))
        for m in MICRO_BATCHES:
            ratios.append(predicted[m] / found[m])
            yield row(
                TABLE, f"{batch} requests, {m} micro-batches", ratios[-1], label="measured", predicted=predicted[m],
                unit="predicted / measured tokens per second", measured=found[m], repetitions=1 if quick else 3,
                configuration=f"{model}; contexts of {CONTEXT}; {'chosen' if m == best else 'not chosen'}",
            )  # fmt: skip
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    yield row(
        TABLE, f"settings predicted within {NEAR:.0%}", near, label="measured", unit=f"of {len(ratios)}",
        least=SETTINGS * len(ratios) / 12,
    )  # fmt: skip
    yield row(
        TABLE, "chosen micro-batches / best", min(chosen), label="measured", least=0.97,
        unit="tokens per second / most, of each number of requests; the smallest",
    )  # fmt: skip


def _predicted(folder: Path, measured: MeasuredSeconds, batch: int, micro_batches: int) -> float:
    """Return the tokens per second of a plan with one worker each."""
    model, (worker, used) = open_served_model(str(folder)), measured_worker(measured, "worker", 1e12)
    plan = DeploymentPlan(
        model=model, level=ServiceLevel(seconds_per_token=1e4, context=CONTEXT), efficiency=used,
        attention=Pool(worker, 1, 1), experts=Pool(worker, 1, 1), experts_per_node=model.experts,
        micro_batches=micro_batches, rows=-(-batch // micro_batches),
    )  # fmt: skip
    return batch / plan.iteration_seconds


def _measured(folder: Path, batch: int, rounds: int) -> dict[int, float]:
    """Return tokens per second of decoding by micro-batches, which take turns; prompts, fed at once, do not count."""
    with ExitStack() as stack:
        drivers = {}
        for m in MICRO_BATCHES:
            layout = WorkerLayout(micro_batches=m, max_batch=batch, max_length=128, max_tokens=batch * PROMPT)
            drivers[m] = Driver(stack.enter_context(RunningWorkers(folder, layout, threads=1)))
            drivers[m].run(prompts(batch), 2)
        found: dict[int, list[float]] = {m: [] for m in drivers}
        for _ in range(rounds):
            for m, driver in drivers.items():
                seconds = [driver.run(prompts(batch), answer).seconds for answer in (1, ANSWER)]
                found[m].append(batch * (ANSWER - 1) / (seconds[1] - seconds[0]))
    return {m: statistics.median(speeds) for m, speeds in found.items()}


if __name__ == "__main__":
    main()
