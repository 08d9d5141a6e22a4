"""Logs of finished steps: metrics.jsonl, TensorBoard, samples.jsonl. Written by rank 0."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from relibra.files import atomic_path
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.response import Response
from relibra.rl.run.step_trace import step_folders
from relibra.rl.tasks.task import Task

SAMPLES_PER_KIND = 3
"""Samples per step of each kind (best, worst, longest): enough to read, small on disk."""


class StepLogs:
    """Appends each finished step to the logs of a run folder."""

    def __init__(self, run: Path, first_step: int = 0) -> None:
        """Open the logs; TensorBoard hides what a killed run logged from `first_step` on."""
        self._metrics = (run / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (run / "samples.jsonl").open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def __enter__(self) -> StepLogs:
        """Return the open logs."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the logs."""
        self._metrics.close()
        self._samples.close()
        self._tensorboard.close()

    def append(self, metrics: dict[str, Any], responses: Sequence[Response], task: Task, tokenizer: Tokenizer) -> None:
        """Write the metrics of a step, synced to disk, and some of rank 0's responses."""
        step = metrics["step"]
        self._metrics.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        for name, value in metrics.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    self._tensorboard.add_scalar(f"{name}/{part}", number, step)
            elif isinstance(value, int | float) and name != "step":
                self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()
        for response in _best_worst_longest(responses):
            line = {
                "step": step,
                "sample": response.sample_id,
                "prompt": task.prompt(response.group_id).text,
                "response": tokenizer.decode(response.tokens_n[response.prompt_length :].tolist()),
                "reward": response.reward,
                "tokens": response.length,
                "finish": response.finish_reason,
                "windows": response.windows,
            }
            self._samples.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._samples.flush()


def remove_steps_from(run: Path, step: int) -> None:
    """Remove logs and traces of steps from `step` on, which a killed run wrote after its checkpoint; collective."""
    if dist.get_rank() == 0:
        for name in ("metrics.jsonl", "samples.jsonl"):
            if (run / name).exists():
                _keep_lines_before(run / name, step)
        for number, folder in step_folders(run / "traces"):
            if number >= step:
                shutil.rmtree(folder)
    dist.barrier()


def _best_worst_longest(responses: Sequence[Response]) -> list[Response]:
    """Return finished responses with the highest and lowest rewards, and the longest, by sample id without repeats."""
    finished = [response for response in responses if response.reward is not None]
    by_reward = sorted(finished, key=lambda response: (response.reward, response.sample_id))
    by_length = sorted(finished, key=lambda response: (-response.length, response.sample_id))
    chosen = (*by_reward[-SAMPLES_PER_KIND:], *by_reward[:SAMPLES_PER_KIND], *by_length[:SAMPLES_PER_KIND])
    return [one for _, one in sorted({response.sample_id: response for response in chosen}.items())]


def _finite(value: Any) -> Any:
    """Replace nan and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_lines_before(path: Path, step: int) -> None:
    """Remove the lines of a log from `step` on, and those without a step: a full disk cuts lines anywhere.

    Lines end at a newline and nowhere else: responses may hold any other character, and half of one where a line ends.
    """
    with path.open("rb") as old, atomic_path(path) as temporary, temporary.open("wb") as new:
        for line in old:
            if _step_of(line) < step:
                new.write(line)


def _step_of(line: bytes) -> float:
    """Return the step of a log line; infinity for a line that was cut off or damaged."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
