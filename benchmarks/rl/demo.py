"""Time of `make demo`. Rows go to results/demo.json.

Run: relibra bench demo [SEED ...] [--quick] [--json] [--output FOLDER]
Three minutes per seed. --quick makes three RL steps after a short warm-up, and writes no rows.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import ROOT, quartiles, write_results

QUICK = ("run.steps=3", "warmup.steps=4", "evaluation.every=0")


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("seeds", type=int, nargs="*", default=[0], metavar="SEED")
    options = parser.parse_args()
    rows = [_row(seed, QUICK if options.quick else ()) for seed in options.seeds]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(
                f"seed {row['seed']}: reward {row['reward_first']} to {row['reward_last']}, {row['seconds']} s in all, "
                f"{row['rl_seconds_per_step']} s per RL step, largest k3 {row['k3_max']:.1e}"
            )
    if not options.quick:
        command = f"relibra bench demo {' '.join(map(str, options.seeds))}"
        print(write_results("demo", rows, command, options.output), file=sys.stderr)


def _row(seed: int, settings: tuple[str, ...]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "relibra", "train", str(ROOT / "examples" / "demo.toml"), "--json"]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, f"run.folder={folder}", f"run.seed={seed}", *settings],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - start
        outcome = json.loads(done.stdout)
        steps = [json.loads(line) for line in Path(outcome["run"], "metrics.jsonl").read_text().splitlines()]
    rewards, each = [step["reward"] for step in steps], [sum(step["seconds"].values()) for step in steps]
    return {
        "case": "make demo",
        "label": "measured",
        "unit": "mean reward of five steps; seconds, of RL steps the mean",
        "reward_first": round(float(np.mean(rewards[:5])), 3),
        "reward_last": round(float(np.mean(rewards[-5:])), 3),
        "seconds": round(seconds, 1),
        "rl_seconds_per_step": round(float(np.mean(each)), 2),
        **quartiles(each, "rl_seconds_per_step"),
        "k3_max": max(step["k3_kl"] for step in steps),
        "seed": seed,
        "repetitions": 1,
        "configuration": f"examples/demo.toml, {len(steps)} RL steps, 2 processes of 1 thread",
    }
