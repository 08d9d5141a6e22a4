"""Logs of finished steps: metrics.jsonl, TensorBoard, samples.jsonl. Written by rank 0."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from relibra.errors import EngineError
from relibra.files import atomic_path
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import wait_for_ranks
from relibra.rl.run.run_folder import check_not_removed, step_folders
from relibra.rl.tasks.task import Task

SAMPLES_PER_KIND = 3
"""Samples per step of each kind (best, worst, longest): enough to read, small on disk."""
_log = logging.getLogger(__name__)


class StepLogs:
    """Appends each finished step to the logs of a run folder."""

    def __init__(self, run: Path, first_step: int = 0) -> None:
        """Open the logs; TensorBoard hides what a killed run logged from `first_step` on."""
        self._run = run
        self._metrics = (run / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (run / "samples.jsonl").open("a", encoding="utf-8")
        self._tensorboard = _EventFile(run / "tensorboard", first_step)

    def __enter__(self) -> StepLogs:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the logs; lines that a full disk left in their buffers may be lost: their step has not finished."""
        for file in (self._metrics, self._samples):
            with suppress(OSError):
                file.close()
        self._tensorboard.close()

    def append(self, metrics: dict[str, Any], responses: Sequence[Response], task: Task, tokenizer: Tokenizer) -> None:
        """Write the metrics of a step, synced to disk, and some of rank 0's responses.

        raises    EngineError where the folder is gone, or the disk refuses: then the lines of this step may be cut
        """
        check_not_removed(self._run)
        step = metrics["step"]
        with self._writing("metrics.jsonl", step):
            self._metrics.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        self._tensorboard.append(step, metrics)
        with self._writing("samples.jsonl", step):
            self._append_samples(step, responses, task, tokenizer)

    def _append_samples(self, step: int, responses: Sequence[Response], task: Task, tokenizer: Tokenizer) -> None:
        for response in _best_worst_longest(responses):
            prompt = task.prompt(response.group_id)
            line = {
                "step": step,
                "sample": response.sample_id,
                "prompt": prompt.text,
                "answer": task.answer(prompt),
                "response": tokenizer.decode(response.tokens_n[response.prompt_length :].tolist()),
                "reward": response.reward,
                "tokens": response.length,
                "finish": response.finish_reason,
                "windows": response.windows,
                "versions": np.stack(np.unique(response.versions_r, return_counts=True), axis=1).tolist(),
            }
            self._samples.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._samples.flush()

    @contextmanager
    def _writing(self, name: str, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"cannot write step {step} to {self._run / name}: {error.strerror or error}; make room, then resume "
                "the run"
            ) from error


class _EventFile:
    """A file of events for TensorBoard, with the numbers of metrics.jsonl; if the disk refuses it, only this file ends.

    torch's SummaryWriter writes in a thread of its own, whose errors are tracebacks on stderr.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open a new file; TensorBoard hides what earlier files of the folder hold from `first_step` on."""
        self._file: BinaryIO | None = None
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._try(lambda: self._open(first_step))

    def append(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the numbers of a step, and those of its tables as NAME/PART."""
        parts = {name: value if isinstance(value, dict) else {"": value} for name, value in metrics.items()}
        numbers = {
            f"{name}/{part}" if part else name: number
            for name, table in parts.items()
            for part, number in table.items()
            if isinstance(number, int | float) and name != "step"
        }
        self._try(lambda: self._write([Event(step=step, summary=scalar(name, numbers[name])) for name in numbers]))

    def close(self) -> None:
        """Close the file."""
        self._try(lambda: self._file.close() if self._file else None)

    def _open(self, first_step: int) -> None:
        self._path.parent.mkdir(exist_ok=True)
        self._file = self._path.open("wb")
        start = Event(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._write([Event(file_version="brain.Event:2"), start])

    def _write(self, events: Sequence[Event]) -> None:
        if self._file is None:
            return
        writer = RecordWriter(self._file)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        self._file.flush()

    def _try(self, action: Callable[[], None]) -> None:
        """Do something; after a first error nothing more is written, because readers stop at a record that was cut."""
        try:
            action()
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):
                if file is not None:
                    file.close()
            _log.warning(
                f"cannot write {self._path} for TensorBoard ({error.strerror or error}): training continues without "
                "it; metrics.jsonl has its numbers"
            )


def remove_steps_from(run: Path, step: int) -> None:
    """Remove logs and traces of steps from `step` on, which a killed run wrote after its checkpoint; collective."""
    if dist.get_rank() == 0:
        for name in ("metrics.jsonl", "samples.jsonl"):
            if (run / name).exists():
                _keep_lines_before(run / name, step)
        for number, folder in step_folders(run / "traces"):
            if number >= step:
                shutil.rmtree(folder)
    wait_for_ranks()


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

    Only a newline ends a line: responses may hold all other characters, and a cut line may end inside a character.
    Damaged lines before the last one that stays are reported.
    """
    damaged, told = 0, 0
    with path.open("rb") as old, atomic_path(path) as temporary, temporary.open("wb") as new:
        for line in old:
            at = _step_of(line)
            damaged += math.isinf(at)
            if at < step:
                new.write(line)
                told = damaged
    if told:
        _log.warning("%s: damaged lines among those of finished steps, %d in all, are left out", path, told)


def _step_of(line: bytes) -> float:
    """Return the step of a log line; infinity for a line that was cut off or damaged."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
