"""Replicas that last from step to step, beside plans that know the step.

Rows go to results/lasting.json. Steps of 4 mini-batches follow each other on simulated H100, rows once per node; each
draws its samples from the half of the recording (or of the generated samples) that the step before did not draw from.
`plan.lasting` takes homes and replicas chosen from the step before and splits the token-slots of the step over them;
the plan beside it starts from the same homes, knows the step and chooses everything again. The recordings are not part
of the project; the program says so when they are not there.
Run: relibra bench lasting [--quick] [--json] [--data FOLDER] [--output FOLDER]. Six minutes.
--quick: 16 ranks with 8,192 tokens; writes no rows.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.planner.step_cells import (
    COMMON,
    RECORDINGS,
    Case,
    Cell,
    draw_step,
    generated_pool,
    make_case,
    recorded_pool,
)
from benchmarks.planner.step_rows import default_budget, simulate
from relibra.planning.plan import StepPlan
from relibra.planning.planner import choose_residents, plan_step
from relibra.routing.demand import Demand

STEPS = 5
TARGETS = {"median": 1.03, "worst": 1.08}
"""Most seconds over those of the plan that knows the step."""


def main() -> None:
    options = measurement_options(__doc__, data=True).parse_args()
    rows = [cell_row(cell, options.data) for cell in cells(options.data) if not options.quick or is_quick(cell)]
    rows.append(summary(rows))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table("case", "ratio_median", "ratio_worst", "ratio_to_static", box=None, pad_edge=False)
        for row in rows:
            table.add_row(
                row["case"], *(f"{row[name]:.3f}" for name in ("ratio_median", "ratio_worst", "ratio_to_static"))
            )
        Console().print(table)
    if not options.quick:
        print(write_results("lasting", rows, "relibra bench lasting", options.output), file=sys.stderr)


def cells(data: Path) -> list[Cell]:
    """Return the cells whose recording is there; one line names those that are left out."""
    missing = {name for name, (file, _) in RECORDINGS.items() if not (data / file).exists()}
    for name in sorted(missing):
        print(f"skipped: {data / RECORDINGS[name][0]} is not there; name its folder with --data", file=sys.stderr)
    return [
        Cell(source=source, ranks=ranks, dispatch="hierarchical", tokens=tokens, mini_batches=4)
        for source in (*RECORDINGS, COMMON)
        if source not in missing
        for ranks in (8, 16, 32)
        for tokens in (2048, 8192)
    ]


def is_quick(cell: Cell) -> bool:
    """Return whether --quick has this cell."""
    return (cell.ranks, cell.tokens) == (16, 8192)


def cell_row(cell: Cell, data: Path) -> dict[str, Any]:
    """Plan and simulate the steps of a cell with replicas that last and with plans that know the step."""
    pool = recorded_pool(cell.source, data) if cell.source in RECORDINGS else generated_pool(cell.source, cell.seed)
    case = make_case(cell, data)
    halves = split_pool(pool, np.random.default_rng(cell.seed))
    before = of_step(case, halves[0], 0)
    plan, _ = plan_seconds(before)
    ratios, to_static = [], []
    for step in range(1, STEPS):
        residents = choose_residents(
            plan, before.demand, before.cluster, default_budget(before), expert=before.model.expert
        )
        now = of_step(case, halves[step % 2], step)
        _, known_seconds = plan_seconds(now, previous=plan)
        lasting, lasting_seconds = plan_seconds(now, previous=plan, residents=residents)
        static = plan_step(now.demand, now.cluster, balancer="static", expert=now.model.expert)
        ratios.append(lasting_seconds / known_seconds)
        to_static.append(seconds(static, now) / lasting_seconds)
        plan, before = lasting, now
    return {
        "case": f"{cell.source}, {cell.ranks} ranks, {cell.exchange}, {cell.tokens} tokens",
        "table": "cells",
        "label": "simulated",
        "unit": "seconds of a step with replicas that last / seconds with a plan that knows the step",
        "seed": cell.seed,
        "repetitions": STEPS - 1,
        "ratio_median": float(np.median(ratios)),
        "ratio_worst": max(ratios),
        "ratio_to_static": float(np.median(to_static)),
        "slots": plan.slots,
        "moved": plan.num_moved,
        "ratios": ratios,
        "configuration": f"{cell.micro_batches} micro-batches in 4 mini-batches, {STEPS - 1} steps after the first",
    }


def split_pool(pool: Demand, rng: np.random.Generator) -> list[Demand]:
    """Return two halves of a pool's samples, drawn at random."""
    order = rng.permutation(len(pool.sample_ids))
    parts = [np.sort(part) for part in np.array_split(order, 2)]
    return [
        replace(
            pool,
            counts_SLE=pool.counts_SLE[part],
            sample_ids=np.arange(len(part)),
            pairs_LEE=None if pool.pairs_LEE is None else pool.pairs_LEE // 2,
        )
        for part in parts
    ]


def of_step(case: Case, pool: Demand, step: int) -> Case:
    """Return the case of one step: other samples, drawn with another seed."""
    return replace(case, demand=draw_step(pool, replace(case.cell, seed=case.cell.seed + step)))


def plan_seconds(case: Case, **how: Any) -> tuple[StepPlan, float]:
    """Plan a step as training does; return the plan and its simulated seconds."""
    plan = plan_step(case.demand, case.cluster, default_budget(case), expert=case.model.expert, **how)
    return plan, seconds(plan, case)


def seconds(plan: StepPlan, case: Case) -> float:
    """Return the simulated seconds of a plan, with its share of the moves of homes."""
    return simulate(plan, case, "relibra")[1].with_relocation_over(default_budget(case).steps_served).seconds


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of all cells: median and worst ratio of all steps."""
    ratios = [ratio for row in rows for ratio in row["ratios"]]
    return {
        "case": "all cells",
        "table": "all",
        "label": "simulated",
        "unit": rows[0]["unit"],
        "seed": 0,
        "repetitions": len(ratios),
        "ratio_median": float(np.median(ratios)),
        "ratio_worst": max(ratios),
        "ratio_to_static": float(np.median([row["ratio_to_static"] for row in rows])),
        "target": TARGETS["median"],
        "target_worst": TARGETS["worst"],
        "configuration": f"{len(rows)} cells",
    }


if __name__ == "__main__":
    main()
