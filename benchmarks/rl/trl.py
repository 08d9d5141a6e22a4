"""A GRPO step of `relibra train` beside TRL's GRPOTrainer: CPU seconds and memory of the same job.

Both train the same tiny MoE model on the same prompts, with the same lengths and number of answers, micro-batches and
optimizer steps, and recompute activations. All else is each one's default; TRL samples by transformers, and runs by
torchrun (DDP), as `accelerate launch` would do it: on both sides a launcher waits, whose memory counts. Their runs take
turns. Rows go to results/trl.json.
Run: relibra bench trl [--quick] [--json] [--output FOLDER]. A quarter of an hour.
--quick trains two cells once, few steps, and writes no rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.options import measurement_options
from benchmarks.harness.process_tree import tree_bytes, tree_cpu_seconds
from benchmarks.harness.provenance import ROOT, quartiles, write_results
from benchmarks.rl.trl_job import (
    ANSWER,
    ANSWERS,
    LEARNING_RATE,
    MICRO_BATCH,
    PROMPT,
    PROMPTS,
    SIZES,
    WORDS,
    Cell,
)  # fmt: skip
from relibra.errors import EngineError
from relibra.reporting.data.metrics import read_metrics

WARM_UP, STEPS, PAIRS = 1, 3, 3
"""RL steps of a run that are not counted, those that are, and runs of each side."""
CELLS = tuple(
    Cell(ranks=ranks, dtype=dtype, mini_batches=mini_batches, steps=WARM_UP + STEPS)
    for ranks in (1, 2)
    for dtype in ("float32", "bfloat16")
    for mini_batches in (1, 4)
)
QUICK = (
    Cell(ranks=1, dtype="float32", mini_batches=1, steps=2),
    Cell(ranks=2, dtype="bfloat16", mini_batches=4, steps=2),
)
TARGET, MEMORY_TARGET = 0.9, 1.1
"""Most CPU seconds of a step, and memory, over those of TRL."""
POLL_SECONDS, MEMORY_SECONDS = 0.01, 0.2
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of one side.

    seconds   CPU seconds of all its processes per counted RL step
    bytes     the most memory of all its processes up to the last step, looked at five times a second
    stages    of relibra: seconds of rank 0 per stage and counted step, medians
    """

    seconds: float
    bytes: int
    stages: Mapping[str, float] = field(default_factory=dict)


def main() -> None:
    options = measurement_options(__doc__).parse_args()
    if find_spec("trl") is None:
        print("skipped: TRL is not installed (pip install -e '.[trl]')", file=sys.stderr)
        return
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([*_trl_job(), "model", str(folder)], cwd=ROOT, env=_environment(), check=True)
        for cell in QUICK if options.quick else CELLS:
            pairs = 1 if options.quick else PAIRS
            warm_up = 1 if options.quick else WARM_UP
            runs = [(run_trl(folder, cell, warm_up), run_relibra(folder, cell, warm_up)) for _ in range(pairs)]
            found.append(result_row(cell, runs))
            print(in_words(found[-1]), file=sys.stdout if not options.json else sys.stderr, flush=True)
    if options.json:
        print(json.dumps(found, indent=1))
    if not options.quick:
        print(write_results("trl", found, "relibra bench trl", options.output), file=sys.stderr)


def run_trl(folder: Path, cell: Cell, warm_up: int) -> Job:
    """Train a cell with TRL."""
    told = folder / "steps.txt"
    told.unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.ranks)]
    command = [*torchrun, *_trl_job()[1:], "train", str(folder), cell.as_json()]
    return _watched(command, lambda: told.read_bytes().count(b"\n") if told.exists() else 0, cell, warm_up)


def run_relibra(folder: Path, cell: Cell, warm_up: int) -> Job:
    """Train a cell with `relibra train`."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows = Path(place) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "relibra", "train", *settings(folder, cell), f"run.folder={place}"]
        job = _watched(command, lambda: rows.read_bytes().count(b"\n") if rows.exists() else 0, cell, warm_up)
        counted = read_metrics(rows).rows[warm_up:]
    if any(row["response_length"] != ANSWER for row in counted):
        raise EngineError("an answer of relibra ended early: the model samples its end token")
    stages = {
        name: statistics.median(row["seconds"].get(name, 0.0) for row in counted) for name in counted[0]["seconds"]
    }
    return Job(seconds=job.seconds, bytes=job.bytes, stages=stages)


def settings(folder: Path, cell: Cell) -> list[str]:
    """Return the settings of relibra for a cell."""
    return [
        f"run.steps={cell.steps}",
        f"parallel.ranks={cell.ranks}",
        f"model.path={folder}",
        f"model.dtype={cell.dtype}",
        "task.name=prompts",
        f"task.file={folder / 'prompts.jsonl'}",
        "task.reward=benchmarks.rl.trl_job:share_of_even_words",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.responses_per_prompt={ANSWERS}",
        f"rollout.max_response={ANSWER}",
        "algorithm.preset=grpo",
        "update.activations=recompute",
        f"update.learning_rate={LEARNING_RATE}",
        f"update.mini_batches={cell.mini_batches}",
        f"update.micro_batch_tokens={MICRO_BATCH * (PROMPT + ANSWER)}",
        "checkpoint.every=0",
    ]


def _trl_job() -> list[str]:
    return [sys.executable, "-m", "benchmarks.rl.trl_job"]


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def _watched(command: Sequence[str], steps: Callable[[], int], cell: Cell, warm_up: int) -> Job:
    """Run a program to its end; `steps` returns how many RL steps it has finished."""
    marks, peak, looked = [0.0], 0, 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        try:
            while process.poll() is None:
                if len(marks) <= (done := steps()):
                    marks += [tree_cpu_seconds(process.pid)] * (done + 1 - len(marks))
                if len(marks) <= cell.steps and time.monotonic() - looked > MEMORY_SECONDS:
                    peak, looked = max(peak, tree_bytes(process.pid)), time.monotonic()
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode or len(marks) <= cell.steps:
            said.seek(0)
            raise EngineError(f"{' '.join(command)} made {len(marks) - 1} steps and ended: {said.read()[-2000:]}")
    return Job(seconds=(marks[cell.steps] - marks[warm_up]) / (cell.steps - warm_up), bytes=peak)


def result_row(cell: Cell, runs: Sequence[tuple[Job, Job]]) -> dict[str, Any]:
    """Return the row of a cell from its pairs of runs: TRL, relibra."""
    trl, own = ([pair[side] for pair in runs] for side in (0, 1))
    seconds, trl_seconds = (statistics.median(job.seconds for job in side) for side in (own, trl))
    mib, trl_mib = (statistics.median(job.bytes for job in side) / 2**20 for side in (own, trl))
    ratio, memory_ratio = seconds / trl_seconds, mib / trl_mib
    return {
        "case": f"{cell.ranks} process{'es' * (cell.ranks > 1)}, {cell.dtype}, {cell.mini_batches} mini-batch"
        f"{'es' * (cell.mini_batches > 1)}",
        "label": "measured",
        "unit": "CPU seconds of all processes per RL step, MiB of all processes at once, medians of runs",
        "ranks": cell.ranks,
        "seconds": seconds,
        "trl_seconds": trl_seconds,
        "ratio": ratio,
        **quartiles([one.seconds / other.seconds for other, one in runs], "ratio"),
        "mib": mib,
        "trl_mib": trl_mib,
        "memory_ratio": memory_ratio,
        "target": f"<= {TARGET}, <= {MEMORY_TARGET}",
        "ok": ratio <= TARGET and memory_ratio <= MEMORY_TARGET,
        "stages": {name: statistics.median(job.stages[name] for job in own) for name in own[0].stages},
        "seed": 0,
        "repetitions": len(runs),
        "configuration": f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, "
        f"{SIZES['num_experts_per_tok']} of {SIZES['num_experts']} experts of width "
        f"{SIZES['moe_intermediate_size']}, {WORDS} words, {PROMPTS} prompts of {PROMPT} tokens, {ANSWERS} answers of "
        f"{ANSWER} to each, micro-batches of {MICRO_BATCH * (PROMPT + ANSWER)} tokens, 1 thread per process",
    }


def in_words(row: Mapping[str, Any]) -> str:
    """Return a row for a person."""
    stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["stages"].items() if seconds >= 0.001)
    return (
        f"{row['case']}: {row['seconds']:.2f} s, TRL {row['trl_seconds']:.2f} s, {row['ratio']:.2f}x; "
        f"{row['mib']:.0f} MiB, TRL {row['trl_mib']:.0f}, {row['memory_ratio']:.2f}x\n  relibra's seconds: {stages}"
    )


if __name__ == "__main__":
    main()
