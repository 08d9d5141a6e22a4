"""Whole runs of tiny policies inside this process, alone, or inside a few processes that make many runs each."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from relibra.environment import STOP_SIGNALS
from relibra.rl import step, trainer
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.tasks.task import Prompt
from relibra.rl.toy.tasks import Arithmetic
from relibra.rl.update.policy_update import update_policy
from tests.rl.joined import CPU, alone, on_ranks

TINY = (
    "warmup.steps=2",
    "warmup.batch=8",
    "run.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.responses_per_prompt=2",
    "rollout.max_response=12",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_experts=4",
    "update.mini_batches=2",
    "critic.pretrain_steps=0",
    "critic.min_finished=1",
    "critic.explained_variance_gate=off",
)


def tiny_config(*overrides: str, ranks: int = 2) -> RunConfig:
    return load_config(None, [*TINY, f"parallel.ranks={ranks}", *overrides])


@dataclass(frozen=True)
class ByLetters(Arithmetic):
    """The task with a reward that an untrained policy earns now and then, so that there is something to learn."""

    def reward(self, prompt: Prompt, response: str, *, stopped: bool) -> float:  # noqa: ARG002
        return sum(map(ord, response)) % 3 / 2


def _task(settings: Any, seed: int, _held_out: int) -> ByLetters:
    return ByLetters(seed, settings.max_terms, settings.continue_probability)


def _plain_descent(model: torch.nn.Module, _learning_rate: float, _update: Any) -> torch.optim.Optimizer:
    """Stand in for AdamW, which would blow up the last bits of gradients that are zero but for rounding."""
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, foreach=False)


def run_in_group(overrides: Sequence[str], run: Path, *, descent: bool = False, note: Any = None) -> list[dict]:
    """Make a whole run, or go on with it, as a rank of the joined group; return this rank's metrics.

    descent   plain descent instead of AdamW
    note      called with (model, batch) of every step before the update
    """
    config = tiny_config(*overrides, ranks=dist.get_world_size())
    if dist.get_rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    rows: list[dict] = []

    def rl_step(*args: Any) -> Any:
        result = step.rl_step(*args)
        rows.append(result.metrics)
        return result

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(trainer, "make_task", _task))
        patches.enter_context(mock.patch.object(trainer, "rl_step", rl_step))
        if descent:
            patches.enter_context(mock.patch.object(trainer, "make_optimizer", _plain_descent))
        if note:
            patches.enter_context(mock.patch.object(step, "update_policy", _noting(note)))
        trainer.train_rank(config, run, CPU)
    for number, handler in before.items():
        signal.signal(number, handler)
    return rows


def _noting(note: Any) -> Any:
    def noted(model: Any, optimizer: Any, batch: Any, *args: Any, **options: Any) -> Any:
        note(model, batch)
        return update_policy(model, optimizer, batch, *args, **options)

    return noted


def run_alone(overrides: Sequence[str], run: Path, **options: Any) -> list[dict]:
    """Make a whole run on one rank, in this process."""
    with alone():
        return run_in_group(overrides, run, **options)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left: metrics as rank 0 wrote them, those of every rank, and the weights of the policy."""

    run: Path
    rows: list[dict]
    of_ranks: list[list[dict]]
    weights: dict[str, torch.Tensor]


def outcome_of(run: Path, of_ranks: list[list[dict]]) -> Outcome:
    """Read what a run left."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    [weights] = (run / "policy").glob("*model.safetensors")  # of the model, or of its adapter
    return Outcome(run=run, rows=rows, of_ranks=of_ranks, weights=load_file(weights))


def run_on_ranks(
    num_ranks: int, cases: Mapping[str, Sequence[str]], folder: Path, *, descent: bool = False
) -> dict[str, Outcome]:
    """Make all runs one after another in a few processes; return what each left, by case."""
    folder.mkdir(parents=True, exist_ok=True)
    of_ranks = on_ranks(num_ranks, partial(_make_runs, dict(cases), descent), folder)
    return {name: outcome_of(folder / name, [rows[name] for rows in of_ranks]) for name in cases}


def _make_runs(cases: dict[str, Sequence[str]], descent: bool, folder: Path) -> dict[str, list[dict]]:
    return {name: run_in_group(overrides, folder / name, descent=descent) for name, overrides in cases.items()}


_MAY_DIFFER = ("seconds", "plan_seconds", "wait_seconds")
PLAN_COLUMNS = (
    *("planned_skew", "plan_bound", "replicas", "pushes", "moved_experts", "rank_skew", "expert_skew"),
    *("expected_seconds", "expected_static_seconds", "expected_moving_seconds", "bytes", "slots", "pass_skews"),
    *("known_rows", "wait_seconds"),
)
"""What a plan changes in the metrics of the same training."""


def comparable(rows: Sequence[dict], *without: str) -> list[dict]:
    """Return metrics without what may differ between equal runs."""
    return [{name: value for name, value in row.items() if name not in (*_MAY_DIFFER, *without)} for row in rows]


def assert_same_bits(one: Outcome, other: Outcome, *without: str) -> None:
    """Two runs have trained the same, to the last bit."""
    for a, b in zip(comparable(one.rows, *without), comparable(other.rows, *without), strict=True):
        assert a == b, f"step {a['step']}: { {name: (a[name], b.get(name)) for name in a if a[name] != b.get(name)} }"
    assert one.weights.keys() == other.weights.keys()
    assert [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])] == []


def assert_near(one: Outcome, other: Outcome, tolerance: float) -> None:
    """The policies of two runs are the same but for rounding."""
    assert one.weights.keys() == other.weights.keys()
    for name, weights in one.weights.items():
        torch.testing.assert_close(
            other.weights[name], weights, atol=tolerance, rtol=0, msg=lambda text, at=name: f"{at}: {text}"
        )


def assert_trained(outcome: Outcome) -> None:
    """Guard against tests that compare models nobody trained."""
    assert any((row["grad_norm"] or 0) > 1e-3 for row in outcome.rows), [row["grad_norm"] for row in outcome.rows]
    assert sum(row["trained_tokens"] for row in outcome.rows) > 0
