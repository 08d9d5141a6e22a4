"""Rollouts ahead of training, and rollouts that training waits for: whole runs on two cores, three seeds.

Two ranks train on one core, and `relibra serve` samples on the other, as trainer and server have devices of their own.
All runs start from one warm-up and sample from one server; for each seed `rollout.ahead` is 0 and 1, and which goes
first takes turns. The first step, which compiles, and the last, beside which nothing is sampled, are not counted.
Rows go to results/ahead.json.
Run: relibra bench ahead [--quick] [--json] [--output FOLDER]. Ten minutes, on two cores that do nothing else.
--quick takes a small model, one seed and few steps, and writes no rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.rl.runs import Rows, trained, warmed_up
from relibra.environment import worker_environment
from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout.own_server import ServerProcess, serve_command

SETTINGS = (
    "parallel.ranks=2",
    "task.max_terms=24",
    "task.continue_probability=0.9",
    "model.hidden_size=64",
    "model.expert_width=192",
    "model.num_layers=2",
    "model.num_experts=8",
    "rollout.prompts_per_step=24",
    "rollout.responses_per_prompt=8",
    "rollout.max_prompt=56",
    "rollout.max_response=144",
    "algorithm.preset=grpo",
    "update.mini_batches=8",
    "update.micro_batch_tokens=4096",
)
WARM_UP = ("warmup.steps=200",)
QUICK = ("model.hidden_size=32", "model.expert_width=32", "rollout.prompts_per_step=8", "rollout.max_response=24")
SERVER = "rollout.server_options='--micro-batches 1'"
"""Two micro-batches would compute in turn: attention and experts share a core."""
STEPS, SEEDS = 18, 3
RATIO, PLAN_SHARE = 1.3, 0.01
"""Goals: tokens per second ahead / waiting, and the wait for the plan as a share of a step."""
LEAST_SHARE, MOST_SHARE = 0.35, 0.65
"""Of the rollout in a step that waits for it: what the sizes are chosen for."""
UNIT = (
    "tokens per second: sampled and trained; ratio: ahead / waiting, same seed; rollout and plan: seconds that a step "
    "waits for them, with rewards in plan, as a share of the step; reward: mean of the last quarter of the steps; "
    "ages: of tokens when they are trained, in steps; mixed: tokens whose routes later weights recorded"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its metrics, and when each step ended, in seconds."""

    ahead: int
    seed: int
    rows: Rows
    ends: Sequence[float]

    @property
    def counted(self) -> Rows:
        """All steps but the first and the last."""
        return self.rows[1:-1]

    @property
    def seconds(self) -> list[float]:
        """Of each step that is counted."""
        return np.diff(self.ends[:-1]).tolist()

    @property
    def tokens_per_second(self) -> float:
        """Tokens that were sampled and trained."""
        return float(sum(row["sampled_tokens"] for row in self.counted) / sum(self.seconds))

    @property
    def last_reward(self) -> float:
        """Mean of the last quarter of all steps."""
        return float(np.mean([row["reward"] for row in self.rows[-max(1, len(self.rows) // 4) :]]))

    def share(self, *stages: str) -> float:
        """Return the seconds of stages over those of the steps that are counted."""
        return float(
            sum(row["seconds"].get(stage, 0.0) for row in self.counted for stage in stages) / sum(self.seconds)
        )


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Let processes that are started inside run on one core of this process's."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        raise ConfigError("this benchmark needs two cores, one for the ranks and one for the server: it may use one")
    os.sched_setaffinity(0, {sorted(before)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def runs(folder: Path, *, quick: bool) -> Iterator[Run]:
    """Train with every seed ahead and waiting."""
    own = (*SETTINGS, *(QUICK if quick else ()))
    policy = warmed_up((*own, *WARM_UP, *(("warmup.steps=4",) if quick else ())), folder, "warm-up")
    config = load_config(None, [*own, "rollout.engine=serve", SERVER])
    with on_core(1):
        server = ServerProcess(serve_command(config, str(policy)), worker_environment(1), folder / "server.log")
    try:
        url = server.wait_for_address(config.rollout.start_seconds)
        served = ("rollout.engine=vllm", f"rollout.url={url}", f"rollout.server_weights={policy.parent / 'weights'}")
        for seed in range(1 if quick else SEEDS):
            for ahead in (0, 1) if seed % 2 == 0 else (1, 0):
                name, steps = f"ahead-{ahead}-{seed}", 4 if quick else STEPS
                settings = (*own, *served, f"run.seed={seed}", f"run.steps={steps}", f"rollout.ahead={ahead}")
                with on_core(0):
                    rows = trained(settings, policy, folder, name)
                run = Run(ahead=ahead, seed=seed, rows=rows, ends=step_ends(folder / name))
                print(f"{name}: {run.tokens_per_second:.0f} tokens per second", file=sys.stderr, flush=True)
                yield run
    finally:
        server.stop()


def step_ends(run: Path) -> list[float]:
    """Return when each step of a run ended, in seconds."""
    [path] = (run / "tensorboard").iterdir()
    events = LegacyEventFileLoader(str(path)).Load()
    return [*{event.step: event.wall_time for event in events if event.HasField("summary")}.values()]


def result_rows(found: Sequence[Run]) -> list[dict]:
    """Make a row of each run, and one of all seeds."""
    of = {(run.ahead, run.seed): run for run in sorted(found, key=lambda run: (run.seed, run.ahead))}
    rows = [_row(run, of[0, run.seed]) for run in of.values()]
    ahead, waiting = ([row for row in rows if row["ahead"] == number] for number in (1, 0))
    ratios = [row["ratio"] for row in ahead]
    by_run = np.array([[row["reward"] for row in of_runs] for of_runs in (ahead, waiting)])
    error = float(np.sqrt(by_run.var(axis=1, ddof=1).mean() * 2 / len(ahead))) if len(ahead) > 1 else 0.0
    summary = {name: float(np.median([row[name] for row in ahead])) for name in _FIGURES}
    summary |= {"age_max": max(row["age_max"] for row in ahead), "plan_share": max(row["plan_share"] for row in ahead)}
    summary |= {
        "rollout_share": float(np.median([row["rollout_share"] for row in waiting])),
        "reward_difference": float(by_run[0].mean() - by_run[1].mean()),
        "reward_error": error,
    }
    ok = all(reached for _, reached in goals(summary))
    about = {"case": "all seeds", "seed": f"0 to {len(ahead) - 1}", "repetitions": len(ahead), "target": f">= {RATIO}"}
    return [*rows, {**ahead[0], **about, **summary, **quartiles(ratios, "ratio"), "ok": ok, "rewards": []}]


_FIGURES = ("tokens_per_second", "ratio", "step_seconds", "reward", "age_mean", "mixed_share")
"""Whose medians over seeds stand in the row of all."""


def _row(run: Run, waiting: Run) -> dict:
    ages = [row["ahead"] or {"age_mean": 0.0, "age_max": 0, "mixed_share": 0.0} for row in run.counted]
    stages = dict.fromkeys(stage for row in run.counted for stage in row["seconds"])
    plan = sum(row["ahead"]["waited_plan"] for row in run.counted) / sum(run.seconds) if run.ahead else None
    return {
        "case": f"ahead {run.ahead}, seed {run.seed}",
        "label": "measured",
        "unit": UNIT,
        "seed": run.seed,
        "repetitions": len(run.counted),
        "ahead": run.ahead,
        "steps": len(run.rows),
        "tokens_per_second": run.tokens_per_second,
        "ratio": run.tokens_per_second / waiting.tokens_per_second,
        "step_seconds": float(np.median(run.seconds)),
        **quartiles(run.seconds, "step_seconds"),
        "rollout_share": run.share("rollout"),
        "plan_share": run.share("reward", "plan") if plan is None else plan,
        "reward": run.last_reward,
        "rewards": [round(row["reward"], 4) for row in run.rows],
        "age_mean": float(np.mean([age["age_mean"] for age in ages])),
        "age_max": max(age["age_max"] for age in ages),
        "mixed_share": float(np.mean([age["mixed_share"] for age in ages])),
        "seconds_per_stage": {stage: run.share(stage) * float(np.mean(run.seconds)) for stage in stages},
        "target": "",
        "settings": [*SETTINGS, *WARM_UP],
        "configuration": _configuration(),
    }


def _configuration() -> str:
    of = dict(setting.split("=") for setting in SETTINGS)
    return (
        f"{of['model.num_layers']} layers, 2 of {of['model.num_experts']} experts of {of['model.hidden_size']} x "
        f"{of['model.expert_width']}, {of['rollout.prompts_per_step']} x {of['rollout.responses_per_prompt']} "
        f"responses, {of['update.mini_batches']} mini-batches, 2 ranks on one core, relibra serve on the other, float32"
    )


def print_rows(rows: list[dict]) -> None:
    """Print a line for each row, and which goals are reached."""
    for row in rows:
        print(
            f"{row['case']}: {row['tokens_per_second']:.0f} tokens/s, {row['ratio']:.2f}x, {row['step_seconds']:.2f} s "
            f"per step, rollout {row['rollout_share']:.0%}, plan {row['plan_share']:.1%}, reward {row['reward']:.3f}, "
            f"age {row['age_mean']:.2f} (at most {row['age_max']}), mixed {row['mixed_share']:.1%}"
        )
    for row in rows[:-1]:
        print(f"{row['case']}:", ", ".join(f"{name} {spent:.2f}" for name, spent in row["seconds_per_stage"].items()))
    for told, reached in goals(rows[-1]):
        print(f"{told}: {'reached' if reached else 'MISSED'}")


def goals(row: dict) -> list[tuple[str, bool]]:
    """Return what the row of all seeds is held against, and whether that is reached."""
    ratio, plan, rollout, error = (row[name] for name in ("ratio", "plan_share", "rollout_share", "reward_error"))
    return [
        (f"{ratio:.2f} times the tokens per second, goal {RATIO}", ratio >= RATIO),
        (f"a step waits {plan:.2%} of its time for the plan, goal below {PLAN_SHARE:.0%}", plan < PLAN_SHARE),
        (
            f"reward {row['reward_difference']:+.3f}, goal 0 within two standard errors of {error:.3f}",
            abs(row["reward_difference"]) <= 2 * error,
        ),
        (
            f"the rollout takes {rollout:.0%} of a step that waits, goal {LEAST_SHARE:.0%} to {MOST_SHARE:.0%}",
            LEAST_SHARE <= rollout <= MOST_SHARE,
        ),
    ]


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = result_rows(list(runs(Path(folder), quick=options.quick)))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
        print(UNIT)
        if options.quick:
            print("--quick: a small model, few steps. It shows that the program runs; the figures say nothing")
    if not options.quick:
        print(write_results("ahead", rows, "relibra bench ahead", options.output), file=sys.stderr)


if __name__ == "__main__":
    main()
