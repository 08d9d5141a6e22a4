"""RL training with static and with planned experts: whole runs on two processes.

The same policy, from one warm-up, is trained with every expert at its home (transformers' `all_to_all`) and by plans;
with canonical sums both follow the same bits. The experts of the policy are numbered by falling load, which changes no
result and puts the busy ones on rank 0: small models trained for minutes have even routes, real ones have not.
Rows go to results/rl.json.
Run: relibra bench rl [--quick] [--json] [--output FOLDER]. Ten minutes.
--quick takes a small model and few steps, and writes no rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.rl.runs import Rows, trained, warmed_up
from benchmarks.rl.uneven_routes import sort_experts_by_load

SETTINGS = (
    "parallel.ranks=2",
    "run.seed=0",
    "model.hidden_size=512",
    "model.num_layers=4",
    "model.num_experts=16",
    "model.experts_per_token=4",
    "rollout.prompts_per_step=16",
    "rollout.responses_per_prompt=16",
    "plan.cluster=measure",
    "algorithm.preset=grpo",
    "update.mini_batches=4",
)
WARM_UP = ("warmup.steps=150", "warmup.batch=64", "warmup.learning_rate=2e-3")
CASES = (("static", "fast"), ("relibra", "fast"), ("static", "canonical"), ("relibra", "canonical"))
STEPS = {"fast": 10, "canonical": 4}
QUICK = ("model.hidden_size=32", "model.num_layers=2", "rollout.prompts_per_step=8", "rollout.max_response=24")
PLAN_TARGET = 0.02
"""Planning, as a share of the step."""
EDGE = 3
"""Steps that the first and last reward are the mean of."""
UNIT = (
    "seconds per stage and step: medians over steps without the first one; plan share: planning with what it has to "
    "tell other ranks and the move of responses, share of the step; skew: busiest / mean rank in token-slots, static "
    "layout and plan; ratio: step time of static with the same sums, over the row's"
)


def runs(folder: Path, *, quick: bool) -> Iterator[tuple[str, str, Rows]]:
    """Train every case from one warm-up."""
    settings = (*SETTINGS, *(QUICK if quick else ()))
    policy = warmed_up((*settings, *WARM_UP, *(("warmup.steps=4",) if quick else ())), folder, "warm-up")
    first = trained((*settings, "run.steps=1", "plan.balancer=static"), policy, folder, "loads")
    assert first, "the run whose routes are counted made its step"
    sort_experts_by_load(policy, folder / "loads")
    for balancer, sums in CASES:
        steps = 3 if quick else STEPS[sums]
        own = (*settings, f"run.steps={steps}", f"plan.balancer={balancer}", f"plan.sums={sums}")
        yield balancer, sums, trained(own, policy, folder, f"{balancer}-{sums}")


def result_rows(found: list[tuple[str, str, Rows]]) -> list[dict]:
    """Make a row of each case."""
    rows: list[dict] = []
    seconds_of: dict[tuple[str, str], float] = {}
    for balancer, sums, steps in found:
        later = steps[1:]  # the first one compiles
        stages = {stage: _median([row["seconds"].get(stage, 0.0) for row in later]) for stage in later[0]["seconds"]}
        totals = [sum(row["seconds"].values()) for row in later]
        seconds_of[balancer, sums] = _median(totals)
        rewards = [row["reward"] for row in steps]
        edge = min(EDGE, len(steps))
        rows.append({
            "case": f"{balancer}, {sums} sums", "label": "measured", "unit": UNIT, "seed": 0,
            "repetitions": len(later), "balancer": balancer, "sums": sums, "steps": len(steps), "plan": balancer,
            "seconds_train": stages.get("recompute", 0.0) + stages.get("update", 0.0),
            "seconds_step": _median(totals),
            "seconds_per_stage": stages, "step_seconds": _median(totals), **quartiles(totals, "step_seconds"),
            "reward_first": float(np.mean(rewards[:edge])), "reward_last": float(np.mean(rewards[-edge:])),
            "rewards": rewards,
            "same_as_static": _curve(steps) == next(_curve(other) for _, s, other in found if s == sums),
            "rank_skew": _median([row["rank_skew"] for row in later]),
            "planned_skew": _median([row["planned_skew"] or row["rank_skew"] for row in later]),
            "plan_share": _median(
                [row["seconds"].get("plan", 0.0) / total for row, total in zip(later, totals, strict=True)]
            ),
            "moved_experts": [row["moved_experts"] for row in steps],
            "ratio_to_static": seconds_of["static", sums] / _median(totals),
            "settings": [*SETTINGS, *WARM_UP],
            "configuration": _configuration(),
        })  # fmt: skip
    return rows


def _curve(steps: Rows) -> list[tuple]:
    """Return what canonical sums keep the same under every plan."""
    return [(row["reward"], row["response_length"], row["loss"]) for row in steps]


def _median(numbers: Iterable[float | None]) -> float | None:
    """Return the median of the numbers that there are."""
    known = [number for number in numbers if number is not None]
    return float(np.median(known)) if known else None


def _configuration() -> str:
    of = dict(setting.split("=") for setting in SETTINGS)
    return (
        f"{of['model.num_layers']} layers, {of['model.experts_per_token']} of {of['model.num_experts']} experts of "
        f"{of['model.hidden_size']} x {int(of['model.hidden_size']) // 2}, {of['rollout.prompts_per_step']} x "
        f"{of['rollout.responses_per_prompt']} responses, {of['update.mini_batches']} mini-batches, 2 processes of 1 "
        "thread"
    )


def print_rows(rows: list[dict]) -> None:
    """Print a table, and the seconds of the stages under it."""
    titles = (
        "\ncase",
        "\nsteps",
        "s /\nstep",
        "/\nstatic",
        "static\nskew",
        "plan's\nskew",
        "plan\n%",
        "reward\nfirst",
        "reward\nlast",
    )
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for title in titles:
        table.add_column(title, justify="left" if title.endswith("case") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["case"],
            str(row["steps"]),
            f"{row['step_seconds']:.2f}",
            f"{row['ratio_to_static']:.3f}",
            f"{row['rank_skew']:.2f}",
            f"{row['planned_skew']:.2f}",
            f"{100 * row['plan_share']:.1f}",
            f"{row['reward_first']:.3f}",
            f"{row['reward_last']:.3f}",
        )
    console = Console()
    console.print(table)
    for row in rows:
        stages = ", ".join(f"{stage} {spent:.2f}" for stage, spent in row["seconds_per_stage"].items())
        console.print(f"{row['case']}: {stages}", highlight=False)
    console.print(UNIT, highlight=False)


def summary(rows: list[dict]) -> list[str]:
    """Say whether planning is as short as it should be, and whether canonical sums hide the plan."""
    of = {(row["balancer"], row["sums"]): row for row in rows}
    planned, canonical = of["relibra", "fast"], of["relibra", "canonical"]
    met = "reached" if planned["plan_share"] <= PLAN_TARGET else "MISSED"
    same = "the same" if canonical["same_as_static"] else "NOT the same"
    return [
        f"planning takes {planned['plan_share']:.1%} of a step, target {PLAN_TARGET:.0%}: {met}",
        f"canonical sums: rewards, lengths and losses of both balancers are {same}",
    ]


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = result_rows(list(runs(Path(folder), quick=options.quick)))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
        print(*summary(rows), sep="\n")
        if options.quick:
            print("--quick: a small model, few steps. It shows that the program runs; the figures say nothing")
    if not options.quick:
        print(write_results("rl", rows, "relibra bench rl", options.output), file=sys.stderr)
