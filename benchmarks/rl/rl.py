"""RL training with static and with planned experts: whole runs on two processes.

The same policy, from one warm-up, is trained with every expert at its home (transformers' `all_to_all`) and by plans;
with canonical sums both follow the same bits. A third run executes the static layout as plans are executed: what it
gains is the executor's, the rest balance. PPO runs show both stages of the value model, which `relibra` balances live:
its routes are known after its routers only. The experts of the policy are numbered by falling load, which changes no
result and puts the busy ones on rank 0: small models trained for minutes have even routes, real ones have not.
Runs of a pair take turns, so that a slow minute of the machine meets both.
Rows go to results/rl.json.
Run: relibra bench rl [--quick] [--json] [--output FOLDER]. Half an hour.
--quick takes a small model and few steps, and writes no rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.rl.runs import Rows, trained, warmed_up
from benchmarks.rl.uneven_routes import busiest_rank_seconds, sort_experts_by_load

SETTINGS = (
    "parallel.ranks=2",
    "run.seed=0",
    "model.hidden_size=256",
    "model.expert_width=2048",
    "model.num_layers=3",
    "model.num_experts=16",
    "model.experts_per_token=6",
    "rollout.prompts_per_step=16",
    "rollout.responses_per_prompt=8",
    "rollout.max_response=32",
    "plan.cluster=measure",
    "algorithm.preset=grpo",
    "update.mini_batches=1",
    "update.micro_batch_tokens=1024",
)
WARM_UP = ("warmup.steps=40", "warmup.batch=32", "warmup.learning_rate=2e-3")
EXECUTOR = "executor"
BALANCERS = {
    "static": ("plan.balancer=static",),
    EXECUTOR: ("plan.balancer=relibra", "plan.slots=0", "plan.move_homes=false", "plan.pack=false"),
    "relibra": ("plan.balancer=relibra",),
}
"""Settings by name; "static" is transformers' `all_to_all`."""


class Kind(NamedTuple):
    """Runs that are compared: their settings, steps of a run, and turns, each of which trains the same steps again."""

    settings: tuple[str, ...]
    steps: int
    turns: int


KINDS = {
    "fast sums": Kind((), steps=6, turns=3),
    "canonical sums": Kind(("plan.sums=canonical",), steps=4, turns=1),
    "PPO": Kind(("algorithm.preset=ppo", "critic.pretrain_steps=0"), steps=4, turns=3),
}
QUICK = (
    "model.hidden_size=32",
    "model.expert_width=32",
    "model.num_layers=2",
    "rollout.prompts_per_step=8",
    "rollout.max_response=24",
)
TRAIN_TARGET, STEP_TARGET, VALUES_TARGET = 1.45, 1.27, 1.25
"""Recompute and update, the whole step, and both stages of the value model: seconds of static / seconds with plans."""
PLAN_TARGET = 0.02
"""Planning, as a share of the step."""
EDGE = 3
"""Steps that the first and last reward are the mean of."""
UNIT = (
    "seconds per stage and step: medians over steps without the first one of a run; plan share: planning with what it "
    "has to tell other ranks and the move of responses, share of the step; skew: busiest / mean rank in token-slots, "
    "static layout and plan; ratios: seconds of static with the same sums, over the row's, of the step and of "
    "recompute and update; executor: that of the static layout executed as plans are, balance: what a plan adds to it, "
    "as factors of recompute and update; expert share: products of the busiest rank's experts in the last step, timed "
    "beside those of the other rank, share of that step's update"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Runs of one balancer.

    expert_seconds   of the busiest rank's experts in the last update of the static layout's first run
    """

    balancer: str
    kind: str
    turns: list[Rows]
    expert_seconds: float

    @property
    def later(self) -> Rows:
        """Steps of all turns without the first of each, which compiles."""
        return [row for steps in self.turns for row in steps[1:]]


def cases(folder: Path, *, quick: bool) -> Iterator[Case]:
    """Train every case from one warm-up."""
    settings = (*SETTINGS, *(QUICK if quick else ()))
    policy = warmed_up((*settings, *WARM_UP, *(("warmup.steps=4",) if quick else ())), folder, "warm-up")
    first = trained((*settings, "run.steps=1", "plan.balancer=static"), policy, folder, "loads")
    assert first, "the run whose routes are counted made its step"
    sort_experts_by_load(policy, folder / "loads")
    for name, kind in KINDS.items():
        turns: dict[str, list[Rows]] = {balancer: [] for balancer in BALANCERS}
        for turn in range(1 if quick else kind.turns):
            for balancer in BALANCERS:
                own = (f"run.steps={3 if quick else kind.steps}", *kind.settings, *BALANCERS[balancer])
                run = f"{balancer}-{name.replace(' ', '-')}-{turn}"
                turns[balancer].append(trained((*settings, *own), policy, folder, run))
        settings_of = dict(setting.split("=") for setting in settings)
        busiest = busiest_rank_seconds(
            folder / f"static-{name.replace(' ', '-')}-0",
            hidden=int(settings_of["model.hidden_size"]),
            width=int(settings_of["model.expert_width"]),
            num_ranks=int(settings_of["parallel.ranks"]),
            micro_batch_tokens=int(settings_of["update.micro_batch_tokens"]),
        )
        for balancer, of_turns in turns.items():
            yield Case(balancer=balancer, kind=name, turns=of_turns, expert_seconds=busiest)


def result_rows(found: list[Case]) -> list[dict]:
    """Make a row of each case."""
    rows: list[dict] = []
    static, executed = ({case.kind: case for case in found if case.balancer == name} for name in ("static", EXECUTOR))
    for case in found:
        steps, totals = case.turns[0], _step_seconds(case.later)
        stages = {name: _median([row["seconds"].get(name, 0.0) for row in case.later]) for name in steps[0]["seconds"]}
        rewards = [row["reward"] for row in steps]
        edge = min(EDGE, len(steps))
        base = static[case.kind]
        ratio = _ratio_train(base, case)
        executor = 1.0 if case is base else _ratio_train(base, executed[case.kind])
        ratios = [
            _median(_train_seconds(one[1:])) / _median(_train_seconds(other[1:]))
            for one, other in zip(base.turns, case.turns, strict=True)
        ]
        rows.append({
            "case": f"{case.balancer}, {case.kind}", "label": "measured", "unit": UNIT, "seed": 0,
            "repetitions": len(case.later), "balancer": case.balancer, "kind": case.kind, "steps": len(steps),
            "plan": case.balancer,
            "seconds_train": _median(_train_seconds(case.later)), "seconds_step": _median(totals),
            "seconds_per_stage": stages, "step_seconds": _median(totals), **quartiles(totals, "step_seconds"),
            "ratio_train": ratio, **quartiles(ratios, "ratio_train"),
            "executor_ratio": executor, "balance_ratio": ratio / executor,
            "ratio_to_static": _median(_step_seconds(base.later)) / _median(totals),
            **_ratios_of_values(base, case),
            "expert_share": case.expert_seconds / base.turns[0][-1]["seconds"]["update"],
            "reward_first": float(np.mean(rewards[:edge])), "reward_last": float(np.mean(rewards[-edge:])),
            "rewards": rewards,
            "same_as_static": _curve(steps) == _curve(base.turns[0]),
            "largest_loss_difference": max(
                abs(row["loss"] - other["loss"]) for row, other in zip(steps, base.turns[0], strict=True)
            ),
            "rank_skew": _median([row["rank_skew"] for row in case.later]),
            "planned_skew": _median([row["planned_skew"] or row["rank_skew"] for row in case.later]),
            "pushes": [row["pushes"] for row in steps],
            "plan_share": _median(
                [row["seconds"].get("plan", 0.0) / total for row, total in zip(case.later, totals, strict=True)]
            ),
            "moved_experts": [row["moved_experts"] for row in steps],
            "settings": [*SETTINGS, *WARM_UP],
            "configuration": _configuration(),
        })  # fmt: skip
    return rows


def _ratio_train(base: Case, case: Case) -> float:
    """Return the speed of recompute and update, as a multiple of another case's."""
    return _median(_train_seconds(base.later)) / _median(_train_seconds(case.later))


def _ratios_of_values(base: Case, case: Case) -> dict[str, float | None]:
    """Return how many times as fast the two stages of the value model are, with quartiles over turns; None: none."""
    turns = [
        (_median(_value_seconds(one[1:])), _median(_value_seconds(other[1:])))
        for one, other in zip(base.turns, case.turns, strict=True)
    ]
    if not turns[0][0]:
        return {"ratio_values": None, "values_skew": None, "values_skew_balanced": None}
    before, after = np.median([row["pass_skews"].get("update values", [np.nan, np.nan]) for row in case.later], axis=0)
    return {
        "ratio_values": _median(_value_seconds(base.later)) / _median(_value_seconds(case.later)),
        **quartiles([one / other for one, other in turns], "ratio_values"),
        "values_skew": None if np.isnan(before) else float(before),
        "values_skew_balanced": None if np.isnan(after) else float(after),
    }


def _value_seconds(rows: Rows) -> list[float]:
    return [row["seconds"].get("values", 0.0) + row["seconds"].get("update values", 0.0) for row in rows]


def _step_seconds(rows: Rows) -> list[float]:
    return [sum(row["seconds"].values()) for row in rows]


def _train_seconds(rows: Rows) -> list[float]:
    return [row["seconds"].get("recompute", 0.0) + row["seconds"]["update"] for row in rows]


def _curve(steps: Rows) -> list[tuple]:
    """Return what canonical sums keep the same under every plan."""
    return [(row["reward"], row["response_length"], row["loss"]) for row in steps]


def _median(numbers: Iterable[float]) -> float:
    return float(np.median(list(numbers)))


def _configuration() -> str:
    of = dict(setting.split("=") for setting in SETTINGS)
    return (
        f"{of['model.num_layers']} layers, {of['model.experts_per_token']} of {of['model.num_experts']} experts of "
        f"{of['model.hidden_size']} x {of['model.expert_width']}, {of['rollout.prompts_per_step']} x "
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
        "train\n/ st.",
        "values\n/ st.",
        "exe-\ncutor",
        "bal-\nance",
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
            f"{row['ratio_train']:.3f}",
            f"{row['ratio_values']:.3f}" if row["ratio_values"] else "-",
            *(f"{row[name]:.3f}" for name in ("executor_ratio", "balance_ratio")),
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
    """Say which targets are reached, and whether both balancers learn the same."""
    of = {row["case"]: row for row in rows}
    planned, canonical, ppo = (of[f"relibra, {kind}"] for kind in KINDS)

    def told(what: str, ratio: float, target: float) -> str:
        return f"{what} {ratio:.2f}x as fast as static, target {target}: {'reached' if ratio >= target else 'MISSED'}"

    met = "reached" if planned["plan_share"] <= PLAN_TARGET else "MISSED"
    same = "the same" if canonical["same_as_static"] else "NOT the same"
    return [
        f"rank skew {planned['rank_skew']:.2f}; experts are {planned['expert_share']:.0%} of the static update",
        told("recompute and update", planned["ratio_train"], TRAIN_TARGET),
        f"of that {planned['balance_ratio']:.2f}x is balance, {planned['executor_ratio']:.2f}x the executor",
        told("whole step", planned["ratio_to_static"], STEP_TARGET),
        told("both stages of the value model of PPO", ppo["ratio_values"], VALUES_TARGET),
        f"planning takes {planned['plan_share']:.1%} of a step, target {PLAN_TARGET:.0%}: {met}",
        f"fast sums: losses differ by at most {planned['largest_loss_difference']:.1g}",
        f"canonical sums: rewards, lengths and losses of both balancers are {same}",
    ]


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = result_rows(list(cases(Path(folder), quick=options.quick)))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
        print(*summary(rows), sep="\n")
        if options.quick:
            print("--quick: a small model, few steps. It shows that the program runs; the figures say nothing")
    if not options.quick:
        print(write_results("rl", rows, "relibra bench rl", options.output), file=sys.stderr)
