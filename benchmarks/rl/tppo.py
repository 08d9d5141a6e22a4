"""PPO and T-PPO to the same reward: decode steps and seconds of whole runs.

Chains of additions whose lengths have a heavy tail (a power law), and the built-in tiny transformer. All runs start
from one warm-up. PPO decodes as many responses as there are places until the longest of a step has ended; "queued" it
has three times as many responses per step, and three optimizer steps, in the same places, so that those that fall free
take waiting ones; T-PPO adds at most a window to each response and goes on in the next step, and with refill the places
of responses that end inside a window take fresh ones. With "keep" a response that goes on is not fed again: its keys
and values stay in the cache of the sampler, those of the weights that fed them.

What is compared is what it took to come to PPO's plateau: the best mean of three consecutive evaluations among those
that end in the last third of its run, less its standard error. A run is there at the first mean of three as high.
Whether PPO was still moving (the last mean of three, less the one before) is told beside it.
Rows go to results/tppo.json.
Run: relibra bench tppo [--quick] [--json] [--output FOLDER]. Sixteen to thirty minutes.
One process of one thread trains at a time. --quick takes one seed and few steps, and writes no rows.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import write_results
from benchmarks.rl.runs import Rows, first_at, idle_share, points, smoothed, stage_seconds, trained, warmed_up

SETTINGS = (
    "parallel.ranks=1",
    "task.max_terms=64",
    "task.tail_exponent=1.2",
    "model.num_layers=2",
    "model.num_experts=8",
    "algorithm.preset=tppo",
    "rollout.prompts_per_step=32",
    "rollout.responses_per_prompt=1",
    "rollout.max_response=384",
    "update.mini_batches=1",
    "update.micro_batch_tokens=4096",
    "update.learning_rate=1.5e-4",
    "update.lr_warmup_steps=10",
    "evaluation.every=5",
    "evaluation.prompts=192",
    "critic.min_finished=1",
    "critic.explained_variance_gate=off",
)
WARM_UP = ("parallel.ranks=2", "warmup.steps=500", "warmup.batch=64", "warmup.error_rate=0.2")
WHOLE = "rollout.window=0"
WINDOWS = ("rollout.window=48", "algorithm.tail_drop=2")
QUEUE = 3
"""Times as many responses per step as places, where PPO queues them."""
MORE = {
    "PPO": ("run.steps=65", "critic.pretrain_steps=10", WHOLE),
    "PPO, queued": (
        "run.steps=24",
        "critic.pretrain_steps=4",
        WHOLE,
        f"rollout.prompts_per_step={QUEUE * 32}",
        "rollout.max_batch=32",
        f"update.mini_batches={QUEUE}",
        "evaluation.every=2",
    ),
    "T-PPO": ("run.steps=105", "critic.pretrain_steps=14", *WINDOWS),
    "T-PPO, refill": ("run.steps=62", "critic.pretrain_steps=9", *WINDOWS, "rollout.refill=true"),
}
"""Steps in which only the value model learns see about as many finished responses in all, and runs sample about as many
tokens: with refill a step has more of both."""
MORE |= {f"{algorithm}, keep": (*MORE[algorithm], "rollout.on_update=keep") for algorithm in ("T-PPO", "T-PPO, refill")}
WINDOWED = tuple(algorithm for algorithm in MORE if algorithm.startswith("T-PPO"))
QUICK = ("run.steps=4", "evaluation.every=2", "evaluation.prompts=16", "critic.pretrain_steps=1")
SEEDS = 3
LAST = 3
"""Evaluations that a reward is the mean of."""
TARGETS = {"decode_ratio": 2.5, "wall_ratio": 1.8, "queued_ratio": 1.0}
"""What PPO takes to come to its plateau, over what T-PPO takes, in the form that is faster; medians over seeds.
queued_ratio: seconds of PPO that queues its responses, over those of T-PPO."""
RATIOS = {
    "updates": "updates",
    "decode": "decode_steps",
    "passes": "passes",
    "wall": "wall_seconds",
}
"""Ratio to PPO, and the cost it is of."""
UNIT = (
    "RL steps, decode steps, forward passes of the sampler and seconds until the held-out reward is PPO's plateau; "
    "seconds are those of whole RL steps: rollout with prompts fed again, reward, routes on disk, recompute, values, "
    "both updates, weight sync; steps in which only the value model learns are in, warm-up and evaluations are not"
)


@dataclass(frozen=True, kw_only=True)
class Race:
    """The runs of a seed, by algorithm."""

    seed: int
    rows: dict[str, Rows]


def races(seeds: int, folder: Path, *, quick: bool) -> Iterator[Race]:
    """Train with all algorithms from one warm-up; who goes first takes turns."""
    policy = warmed_up((*SETTINGS, *WARM_UP, *(("warmup.steps=8",) if quick else ())), folder, "warm-up")
    for seed in range(seeds):
        rows: dict[str, Rows] = {}
        for algorithm in [*MORE, *MORE][seed % len(MORE) :][: len(MORE)]:
            settings = (*settings_of(algorithm, seed), *(QUICK if quick else ()))
            rows[algorithm] = trained(settings, policy, folder, f"{algorithm.replace(', ', '-')}-{seed}")
        yield Race(seed=seed, rows=rows)


def settings_of(algorithm: str, seed: int) -> tuple[str, ...]:
    """Return the overrides of a run after its warm-up; the last one of a setting wins."""
    return (*SETTINGS, f"run.seed={seed}", *MORE[algorithm])


def reward_to_reach(ppo: Rows) -> float:
    """Return PPO's plateau, less its standard error: the best mean of consecutive evaluations in the last third."""
    means = smoothed([point.reward for point in points(ppo)], LAST)
    mean = max(means[-max(1, len(means) // 3) :])
    prompts = next(int(setting.partition("=")[2]) for setting in SETTINGS if setting.startswith("evaluation.prompts"))
    return mean - math.sqrt(mean * (1 - mean) / (prompts * LAST))


def last_move(rows: Rows) -> float:
    """Return how far the reward still moved at the end of a run: the last mean of evaluations, less the one before."""
    means = smoothed([point.reward for point in points(rows)], LAST)
    return means[-1] - means[-2]


def result_rows(race: Race) -> list[dict]:
    """Make a row of each algorithm, PPO first; what was never reached is None."""
    target = reward_to_reach(race.rows["PPO"])
    found: list[dict] = []
    for algorithm in MORE:
        rows = race.rows[algorithm]
        curve = points(rows)
        reached = first_at(curve, target, LAST)
        # Steps of the value model alone are left out: what a token costs is that of both updates.
        whole = [one for one in rows if "update" in one["seconds"]] or rows
        spent, sampled = stage_seconds(whole), sum(one["sampled_tokens"] for one in whole)
        row = {
            "case": f"{algorithm}, seed {race.seed}", "label": "measured", "unit": UNIT, "seed": race.seed,
            "repetitions": 1, "algorithm": algorithm, "target": target,
            "updates": reached.updates if reached else None,
            "decode_steps": reached.decode_steps if reached else None,
            "passes": reached.passes if reached else None,
            "wall_seconds": reached.seconds if reached else None,
            "final_reward": float(np.mean([point.reward for point in curve[-LAST:]])),
            "first_reward": curve[0].reward,
            "last_move": last_move(rows),
            "idle_share": idle_share(rows),
            "unfinished_share": float(np.mean([one["unfinished_share"] for one in rows])),
            "fed_again": sum(one["prefilled_tokens"] for one in rows) / sum(one["sampled_tokens"] for one in rows),
            "mixed_share": sum(one["mixed_tokens"] for one in rows) / sum(one["sampled_tokens"] for one in rows),
            # Rows that an update computes, over those whose log-probs it reads.
            "rows_per_token": sum(one["tokens"] for one in rows) / sum(one["sampled_tokens"] for one in rows),
            "seconds_per_stage": {stage: seconds / len(whole) for stage, seconds in spent.items()},
            "rollout_us": 1e6 * spent["rollout"] / sampled,
            "training_us": 1e6 * (sum(spent.values()) - spent["rollout"]) / sampled,
            "steps": len(rows),
            "evaluations": [asdict(point) for point in curve],
            "warm_up_settings": [*SETTINGS, *WARM_UP],
            "settings": [*settings_of(algorithm, race.seed)],
            "configuration": _configuration(algorithm, rows),
        }  # fmt: skip
        ppo = found[0] if found else row
        for name, cost in RATIOS.items():
            row[f"{name}_ratio"] = ppo[cost] / row[cost] if ppo[cost] and row[cost] else None
        found.append(row)
    queued = next(row["wall_seconds"] for row in found if row["algorithm"] == "PPO, queued")
    for row in found:
        row["queued_ratio"] = queued / row["wall_seconds"] if queued and row["wall_seconds"] else None
    return found


def _configuration(algorithm: str, rows: Rows) -> str:
    of = dict(setting.split("=") for setting in (*SETTINGS, *MORE[algorithm]))
    longest, prompts = of["rollout.max_response"], of["rollout.prompts_per_step"]
    places = min(int(prompts), int(of.get("rollout.max_batch", prompts)))
    slots = ", refilled inside" if "rollout.refill" in of else ""
    slots += ", keys and values kept over updates" if "rollout.on_update" in of else ""
    return (
        f"{places} slots, {prompts} responses of a step begin in them, window "
        f"{of.get('rollout.window', longest)} of {longest} tokens{slots}, {of['model.num_layers']} layers of "
        f"{of['model.num_experts']} experts, {len(rows)} steps, 1 process of 1 thread; reward: mean of {LAST} "
        f"evaluations of {of['evaluation.prompts']} held-out prompts, at the first that reaches it"
    )


def summary(rows: list[dict]) -> list[str]:
    """Hold the medians over seeds against what should be reached, one sentence each; say what bounds the seconds.

    Both targets are held against the form of T-PPO that is faster. Passes are told beside decode steps, which hide
    refills.
    """
    others = [algorithm for algorithm in MORE if algorithm != "PPO"]
    medians = {
        algorithm: {
            name: float(np.median([row[name] or 0.0 for row in rows if row["algorithm"] == algorithm]))
            for name in (*TARGETS, "passes_ratio")
        }
        for algorithm in others
    }

    def each(name: str) -> str:
        over = "PPO, queued" if name == "queued_ratio" else "PPO"
        held = [algorithm for algorithm in others if algorithm != over]
        return "; ".join(f"{over} / {algorithm} {medians[algorithm][name]:.2f}" for algorithm in held)

    better = max(WINDOWED, key=lambda algorithm: medians[algorithm]["wall_ratio"])
    lines = []
    for name, target in TARGETS.items():
        sign = "reached" if medians[better][name] >= target else "MISSED"
        lines.append(f"{name.replace('_', ' ')}: {each(name)}; target {target} by {better}: {sign}")
    moves = ", ".join(f"{row['last_move']:+.3f}" for row in rows if row["algorithm"] == "PPO")
    told = [
        f"passes ratio: {each('passes_ratio')}",
        f"PPO's reward still moved at its end by {moves}: mean of {LAST} evaluations, less the one before; by seed",
    ]
    return [*lines, *told, *(_bound(rows, algorithm) for algorithm in WINDOWED)]


def _bound(rows: list[dict], windowed: str) -> str:
    """Say how much of PPO's time rollout would have to be, if the same number of sampled tokens teaches the same.

    Then T-PPO saves rollout / (saved rollout per token) and pays for training prefixes again: with s the share of
    rollout, PPO / T-PPO in seconds is 1 / (s / cheaper + (1 - s) x dearer).
    """

    def per_token(algorithm: str, rollout: bool) -> float:
        own = [row for row in rows if row["algorithm"] == algorithm]
        return float(np.median([row["rollout_us" if rollout else "training_us"] for row in own]))

    share = per_token("PPO", True) / (per_token("PPO", True) + per_token("PPO", False))
    cheaper = per_token("PPO", True) / per_token(windowed, True)
    dearer = per_token(windowed, False) / per_token("PPO", False)
    target = TARGETS["wall_ratio"]
    at_equal_tokens = 1 / (share / cheaper + (1 - share) * dearer)
    spread = dearer - 1 / cheaper
    needed = (dearer - 1 / target) / spread if spread else math.nan
    reachable = f"{target} needs {needed:.0%}" if 0 <= needed <= 1 else f"no share gives {target}"
    return (
        f"{windowed}: per sampled token rollout is {cheaper:.2f} times cheaper and the rest {dearer:.2f} times dearer; "
        f"rollout is {share:.0%} of PPO's time, so equal tokens give {at_equal_tokens:.2f}, and {reachable}"
    )


def print_rows(rows: list[dict]) -> None:
    """Print a table."""
    titles = ("seed", "algorithm", "decode\nsteps", "\npasses", "\ntime s")
    titles = (*titles, "PPO/it\ndecode", "PPO/it\npasses", "PPO/it\ntime")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in (*titles, "\nidle", "\nfinal", "to\nreach"):
        table.add_column(title, justify="left" if title == "algorithm" else "right", no_wrap=True, overflow="ignore")
    for row in rows:
        costs = (row["decode_steps"], row["passes"])
        ratios = (row["wall_seconds"], row["decode_ratio"], row["passes_ratio"], row["wall_ratio"])
        table.add_row(
            str(row["seed"]),
            row["algorithm"],
            *("never" if number is None else str(number) for number in costs),
            *("-" if number is None else f"{number:.2f}" for number in ratios),
            *(f"{number:.2f}" for number in (row["idle_share"], row["final_reward"], row["target"])),
        )
    Console(width=96).print(table)
    stages = {row["algorithm"]: row["seconds_per_stage"] for row in rows}
    for algorithm, seconds in stages.items():
        parts = ", ".join(f"{stage} {spent:.2f}" for stage, spent in seconds.items())
        print(f"seconds per step of {algorithm}, last seed: {parts}")
    print(UNIT)


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = races(1 if options.quick else SEEDS, Path(folder), quick=options.quick)
        rows = [row for race in found for row in result_rows(race)]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows)
        if options.quick:
            print(
                "--quick: a few steps after hardly any warm-up. It shows that the program runs; the figures say nothing"
            )
        else:
            print(*summary(rows), sep="\n")
    if not options.quick:
        print(write_results("tppo", rows, "relibra bench tppo", options.output), file=sys.stderr)
