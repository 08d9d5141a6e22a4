"""Speed and memory of the simulator. Rows go to results/simulation.json.

Run: relibra bench simulation [--quick] [--json] [--output FOLDER]. Half a minute on one core.
Each size runs in a process of its own, so that its peak memory is its own; plans are made by dealing homes and filling
slots, which takes no planning time. --quick takes fewer layers and writes no rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.programs import command

CASES = {
    "one group": ({"layers": 94, "micro_batches": 32, "ranks": 64, "stages": 1, "groups": 1}, 3.0),
    "16 stages": ({"layers": 94, "micro_batches": 32, "ranks": 64, "stages": 16, "groups": 4}, 60.0),
    "64 groups": ({"layers": 94, "micro_batches": 32, "ranks": 64, "stages": 1, "groups": 64}, 60.0),
}
"""Sizes, and the seconds that a simulation may take."""

REPETITIONS = 3


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(timed(**options.one)))
        return
    rows = [_row(name, *case, options.quick) for name, case in CASES.items()]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows)
    if not options.quick:
        print(write_results("simulation", rows, "relibra bench simulation", options.output), file=sys.stderr)


def _row(name: str, sizes: dict[str, int], most: float, quick: bool) -> dict:
    sizes = {**sizes, **({"layers": 16, "groups": min(sizes["groups"], 4)} if quick else {})}
    repetitions = 1 if quick or sizes["groups"] > 1 else REPETITIONS
    words = command("simulation", "--one", json.dumps({**sizes, "repetitions": repetitions}))
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
    all_ranks = sizes["ranks"] * sizes["stages"] * sizes["groups"]
    return {
        "case": f"{name}, {all_ranks:,} ranks", "label": "measured", "seed": 0, "repetitions": repetitions,
        "unit": "seconds of one simulated training step, one core, median; MiB resident at the peak",
        "all_ranks": all_ranks, **sizes, **found, "target": most, "ok": "yes" if found["seconds"] <= most else "NO",
        "configuration": "{layers} layers, {micro_batches} micro-batches, groups of {ranks}, {stages} stages, {groups} "
        "groups; 128 experts, 2 slots; kernels compiled before".format(**sizes),
    }  # fmt: skip


def timed(*, layers: int, micro_batches: int, ranks: int, stages: int, groups: int, repetitions: int) -> dict:
    """Simulate in this process; groups come one at a time, as on a machine that could not hold all of them."""
    from dataclasses import replace

    import numpy as np

    from relibra.cluster import cluster_preset
    from relibra.planning.budget import Budget
    from relibra.planning.planner import plan_step
    from relibra.routing.demand import Demand
    from relibra.simulation import Execution, model_shape, simulate_groups

    model, cluster = model_shape("qwen3-235b-a22b"), cluster_preset("h100x8", ranks)
    model = replace(model, moe_layers=layers)
    place = np.arange(micro_batches * ranks)

    def group(number: int):
        rng = np.random.default_rng(number)
        weight_LE = rng.lognormal(0, 0.8, (layers, model.experts))
        share_LE = weight_LE / weight_LE.sum(axis=1, keepdims=True)
        counts_SLE = rng.poisson(1024 * model.top_k * share_LE, (len(place), layers, model.experts)).astype(np.int32)
        demand = Demand(
            counts_SLE=counts_SLE, layer_ids=np.arange(layers, dtype=np.int32), sample_ids=place, top_k=model.top_k
        ).with_schedule(place // ranks, place % ranks, ranks)
        budget = Budget(slots=2, move_homes=False)
        plan = plan_step(demand, cluster, budget, "ultraep")
        return plan, plan.scheduled(demand)

    made = [group(number) for number in range(min(groups, 2))]  # two kinds of groups are enough to differ
    how = Execution(pipeline_stages=stages)

    def simulate():
        return simulate_groups((made[number % len(made)] for number in range(groups)), cluster, model, how)

    simulate_groups(made[:1], cluster, model, how)  # compiles
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, seconds = _mib("VmRSS"), []
    for _ in range(repetitions):
        start = time.perf_counter()
        step = simulate()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds), "slowest": max(seconds), "peak_mib": _mib("VmHWM"),
        "added_mib": _mib("VmHWM") - before, "simulated_seconds": step.seconds,
    }  # fmt: skip


def _mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def _print(rows: list[dict]) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("case", no_wrap=True)
    for title in ("layers", "seconds", "target", "ok", "peak MiB", "added MiB"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        figures = (f"{row['seconds']:.2f}", f"{row['target']:g}", row["ok"])
        table.add_row(row["case"], str(row["layers"]), *figures, f"{row['peak_mib']:.0f}", f"{row['added_mib']:.0f}")
    Console().print(table)
