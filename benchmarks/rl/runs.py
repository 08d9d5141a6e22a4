"""Whole runs of `relibra train` for benchmarks and learning tests: a shared warm-up, then what the steps took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relibra.errors import EngineError
from relibra.reporting.data.metrics import read_metrics
from relibra.rl.config.run_config import load_config
from relibra.rl.run.launch import launch

Rows = Sequence[Mapping[str, Any]]
"""Rows of metrics.jsonl, one per RL step."""

_OF_BUILT_IN = (
    "model.dtype=float32",
    "update.activations=keep",
    "update.learning_rate=2e-4",
    "critic.learning_rate=1e-3",
    "rollout.max_prompt=1024",
    "rollout.max_response=80",
)
"""What a run with the built-in model has, and one with a model of the user has not, unless it is given."""

STAGES = ("rollout", "recompute", "values", "update values", "update")
"""Stages that are told apart; the rest (reward, trace on disk, plan, weight sync) is "other"."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation: the mean reward on held-out prompts, and what RL had taken until then.

    updates        RL steps
    decode_steps   rounds that add a token to each response under way; evaluations not counted
    passes         forward passes of the sampler: decode steps, refills, pieces of prefills
    seconds        of all stages of the steps; neither warm-up nor evaluations
    """

    updates: int
    decode_steps: int
    passes: int
    seconds: float
    reward: float


def warmed_up(settings: Sequence[str], folder: Path, name: str) -> Path:
    """Make the warm-up of a run and no RL step; return the folder of the policy."""
    words = [*settings, "run.steps=0", "checkpoint.every=0", f"run.folder={folder}", f"run.name={name}"]
    return _launched(words) / "policy"


def trained(settings: Sequence[str], policy: Path, folder: Path, name: str) -> Rows:
    """Train a policy that a warm-up left, in processes of its own; return the rows of its steps."""
    words = [*_OF_BUILT_IN, *settings, "warmup.steps=0", f"model.path={policy}", "checkpoint.every=0"]
    return read_metrics(_launched([*words, f"run.folder={folder}", f"run.name={name}"]) / "metrics.jsonl").rows


def _launched(words: list[str]) -> Path:
    finished = launch(load_config(None, words))
    assert finished is not None, "a benchmark starts its own ranks: run it without torchrun"
    if not finished.complete:
        raise EngineError(f"{finished.run} was stopped before its last step: the benchmark ends without rows")
    return finished.run


def points(rows: Rows) -> list[Point]:
    """Return the evaluations of a run."""
    found, decode_steps, passes, seconds = [], 0, 0, 0.0
    for row in rows:
        decode_steps += row["decode_steps"]
        passes += row["passes"]
        seconds += sum(row["seconds"].values())
        if row["evaluation"]:
            reward = row["evaluation"]["reward"]
            found.append(
                Point(updates=row["step"] + 1, decode_steps=decode_steps, passes=passes, seconds=seconds, reward=reward)
            )
    return found


def smoothed(rewards: Sequence[float], last: int) -> list[float]:
    """Return the mean of each number and those before it, `last` of them at most.

    >>> smoothed([0.0, 1.0, 2.0], 2)
    [0.0, 0.5, 1.5]
    """
    return [sum(part) / len(part) for part in (rewards[max(0, i + 1 - last) : i + 1] for i in range(len(rewards)))]


def first_at(curve: Sequence[Point], reward: float, last: int) -> Point | None:
    """Return the first evaluation whose mean with the `last - 1` before it is as high; None: never."""
    means = smoothed([point.reward for point in curve], last)
    whole = [*zip(curve, means, strict=True)][last - 1 :]
    return next((point for point, mean in whole if mean >= reward), None)


def idle_share(rows: Rows) -> float:
    """Return the share of slots x decode steps without a response; each step weighs its decode steps."""
    steps = sum(row["decode_steps"] for row in rows)
    return sum(row["idle_share"] * row["decode_steps"] for row in rows) / max(1, steps)


def stage_seconds(rows: Rows) -> dict[str, float]:
    """Return the seconds of each stage over all steps."""
    of_row = [row["seconds"] for row in rows]
    found = {stage: sum(seconds.get(stage, 0.0) for seconds in of_row) for stage in STAGES}
    return {**found, "other": sum(sum(seconds.values()) for seconds in of_row) - sum(found.values())}
