"""The main job as `make demo` runs it, timed. Rows go to results/demo.json.

Run: python benchmarks/demo.py [SEED ...]
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import write_results


def main() -> None:
    rows = []
    for seed in map(int, sys.argv[1:] or ["0"]):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "relibra", "train", "examples/demo.toml", "--json"]
            start = time.perf_counter()
            done = subprocess.run(
                [*command, f"run.folder={folder}", f"run.seed={seed}"], stdout=subprocess.PIPE, text=True, check=True
            )
            seconds = time.perf_counter() - start
            outcome = json.loads(done.stdout)
            steps = [json.loads(line) for line in Path(outcome["run"], "metrics.jsonl").read_text().splitlines()]
        rewards = [step["reward"] for step in steps]
        rows.append(
            {
                "case": "make demo",
                "label": "measured",
                "unit": "mean reward of five steps; seconds",
                "reward_first": round(sum(rewards[:5]) / 5, 3),
                "reward_last": round(sum(rewards[-5:]) / 5, 3),
                "seconds": round(seconds, 1),
                "rl_seconds_per_step": round(sum(sum(step["seconds"].values()) for step in steps) / len(steps), 2),
                "k3_max": max(step["k3_kl"] for step in steps),
                "seed": seed,
                "repetitions": 1,
                "configuration": f"examples/demo.toml, {len(steps)} RL steps, 2 processes of 1 thread",
            }
        )
        print(rows[-1])
    print(write_results("demo", rows))


if __name__ == "__main__":
    main()
