"""Seconds to plan a whole step as training does, with replicas that stay, while layers and micro-batches grow.

Rows go to results/planner_whole_step.json. Loads are generated, one sample per rank and micro-batch, in nodes of 8: 128
experts of Qwen3-30B-A3B on 32 ranks, and 256 of DeepSeek-V3 on 64. Planned is a first step, and a second one of the
same popularity from the homes of the first. Memory is the peak while planning. Kernels are compiled before.
Run: relibra bench whole_step [--quick] [--json] [--output FOLDER]. Five minutes, on two cores.
--quick plans the two smallest sizes and writes no rows.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.planner.cases import status_mib
from benchmarks.planner.steps import domain_step
from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.planner import plan_step
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.config.settings import PlanSettings
from relibra.routing.demand import Demand, ScheduledDemand

TOKENS, THREADS = 1024, 2
SLOT_MEMORY_GIB = 8.0
DISTINCT = 4096
"""Most samples that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a step."""

    layers: int
    micro_batches: int
    ranks: int = 32
    experts: int = 128
    shape: str = "qwen3-30b-a3b"

    def draw(self, step: int, samples: int | None = None, tokens: int = TOKENS) -> ScheduledDemand:
        """Return the demand of one step; of many samples `DISTINCT` are drawn, in turn for all."""
        samples = samples or self.ranks * self.micro_batches
        sizes = {"ranks": self.ranks, "layers": self.layers, "experts": self.experts}
        drawn = domain_step(micro_batches=1, samples=min(samples, DISTINCT), tokens=tokens, seed=0, step=step, **sizes)
        place = np.arange(samples)
        counts_SLE = np.resize(drawn.counts_SLE, (samples, *drawn.counts_SLE.shape[1:]))
        demand = Demand(counts_SLE=counts_SLE, layer_ids=drawn.layer_ids, sample_ids=place, top_k=drawn.top_k)
        return demand.with_schedule(place % self.micro_batches, place // self.micro_batches % self.ranks, self.ranks)


SIZES = tuple(Size(layers=layers, micro_batches=M) for layers, M in ((24, 32), (94, 32), (24, 128), (94, 128)))
LARGEST = Size(layers=58, micro_batches=512, ranks=64, experts=256, shape="deepseek-v3")


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    _compile()
    rows = [row for size in (SIZES[:2] if options.quick else (*SIZES, LARGEST)) for row in rows_of(size)]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        names = ("layers", "micro_batches", "ranks", "case", "seconds", "cpu_seconds", "peak_mib", "moved")
        table = Table(*names, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(str(row[name]) for name in names))
        Console().print(table)
    if not options.quick:
        print(write_results("planner_whole_step", rows, "relibra bench whole_step", options.output), file=sys.stderr)


def _compile() -> None:
    size = Size(layers=2, micro_batches=4)
    for pack in (True, False):
        list(plan_two(size, [size.draw(step, samples=128, tokens=64) for step in (0, 1)], pack=pack))


def rows_of(size: Size) -> Iterator[dict]:
    """Plan the two steps of a size, with a given schedule and with packing."""
    demands = [size.draw(step) for step in (0, 1)]
    for pack in (False, True):
        words = "packed" if pack else "the given schedule"
        for name, found in zip(("first step", "second step"), plan_two(size, demands, pack=pack), strict=True):
            yield {
                "case": f"{size.layers} layers, {size.micro_batches} micro-batches, {name}, {words}",
                "label": "measured",
                "unit": "wall and processor seconds of a plan with the trainer's defaults, on two threads",
                "ranks_and_experts": f"{size.ranks} ranks in nodes of 8, {size.experts} experts",
                "layers": size.layers,
                "micro_batches": size.micro_batches,
                "ranks": size.ranks,
                "experts": size.experts,
                **found,
                "configuration": f"the trainer's defaults, {words}, {THREADS} threads",
                "seed": 0,
                "repetitions": 1,
            }


def plan_two(size: Size, demands: list[ScheduledDemand], *, pack: bool) -> Iterator[dict]:
    """Plan a step, and one that follows it; yield seconds and memory of each."""
    cluster, expert = cluster_preset("h100x8", size.ranks), expert_shape(size.shape)
    budget = plan_budget(PlanSettings(pack=pack), SLOT_MEMORY_GIB)
    previous = None
    for demand in demands:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        wall, cpu = time.perf_counter(), time.process_time()
        plan = plan_step(demand, cluster, budget, expert=expert, previous=previous)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        yield {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu_seconds, 3),
            "ms_each": round(1e3 * seconds / size.layers / size.micro_batches, 3),
            "peak_mib": round(status_mib("VmHWM")),
            "moved": round(plan.num_moved / plan.home_LE.size, 3),
            "resident_slots": plan.slots * plan.resident,
        }
        previous = plan


if __name__ == "__main__":
    main()
