"""Seconds to plan a whole step as training does, with replicas that stay, while layers and micro-batches grow.

Rows go to results/planner_whole_step.json. Loads are generated: 128 experts on 32 ranks in nodes of 8, experts of
Qwen3-30B-A3B, one sample per rank and micro-batch. Planned is a first step, and a second one of the same popularity
from the homes of the first. Kernels are compiled before.
Run: relibra bench whole_step [--quick] [--json] [--output FOLDER]. Three minutes, on two cores.
--quick plans the two smallest sizes and writes no rows.
"""

import json
import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.planner.steps import domain_step
from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.planner import plan_step
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.config.settings import PlanSettings

RANKS, EXPERTS, TOKENS, THREADS = 32, 128, 1024, 2
SLOT_MEMORY_GIB = 8.0
SIZES = ((24, 32), (94, 32), (24, 128), (94, 128))
"""Layers and micro-batches."""


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    _compile()
    rows = [row for sizes in (SIZES[:2] if options.quick else SIZES) for row in _rows(*sizes)]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table("layers", "micro-batches", "case", "seconds", "cpu seconds", "moved", box=None, pad_edge=False)
        for row in rows:
            names = ("layers", "micro_batches", "case", "seconds", "cpu_seconds", "moved")
            table.add_row(*(str(row[name]) for name in names))
        Console().print(table)
    if not options.quick:
        print(write_results("planner_whole_step", rows, "relibra bench whole_step", options.output), file=sys.stderr)


def _compile() -> None:
    for pack in (True, False):
        _plan_two(2, 4, samples=128, tokens=64, pack=pack)


def _rows(layers: int, micro_batches: int) -> list[dict]:
    found = _plan_two(layers, micro_batches, samples=RANKS * micro_batches, tokens=TOKENS)
    return [
        {
            "case": f"{layers} layers, {micro_batches} micro-batches, {name}",
            "label": "measured",
            "unit": "wall and processor seconds of a plan with the trainer's defaults, on two threads",
            "ranks_and_experts": f"{RANKS} ranks in nodes of 8, {EXPERTS} experts",
            "layers": layers,
            "micro_batches": micro_batches,
            "ranks": RANKS,
            "experts": EXPERTS,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu_seconds, 3),
            "ms_each": round(1e3 * seconds / layers / micro_batches, 3),
            "moved": round(moved, 3),
            "resident_slots": resident,
            "configuration": f"the trainer's defaults, {words}, {THREADS} threads",
            "seed": 0,
            "repetitions": 1,
        }
        for name, words, seconds, cpu_seconds, moved, resident in found
    ]


def _plan_two(
    layers: int, micro_batches: int, *, samples: int, tokens: int, pack: bool | None = None
) -> list[tuple[str, str, float, float, float, int]]:
    """Plan a first and a second step, with a given schedule and with packing."""
    cluster, expert, found = cluster_preset("h100x8", RANKS), expert_shape("qwen3-30b-a3b"), []
    sizes = {"ranks": RANKS, "layers": layers, "experts": EXPERTS, "micro_batches": micro_batches}
    demands = [domain_step(samples=samples, tokens=tokens, seed=0, step=step, **sizes) for step in (0, 1)]
    for packs in (False, True) if pack is None else (pack,):
        budget = plan_budget(PlanSettings(pack=packs), SLOT_MEMORY_GIB)
        previous = None
        for name, demand in zip(("first step", "second step"), demands, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            plan = plan_step(demand, cluster, budget, expert=expert, previous=previous)
            spent = time.perf_counter() - wall, time.process_time() - cpu
            words = "packed" if packs else "the given schedule"
            found.append(
                (f"{name}, {words}", words, *spent, plan.num_moved / plan.home_LE.size, plan.slots * plan.resident)
            )
            previous = plan
    return found


if __name__ == "__main__":
    main()
