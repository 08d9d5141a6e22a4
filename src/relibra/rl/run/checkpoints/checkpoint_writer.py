"""Checkpoints that are written in a thread, from a copy in host memory, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relibra.rl.config.settings import CheckpointSettings
from relibra.rl.rollout.response import Response
from relibra.rl.run.checkpoints.checkpoint import Models, StagedCheckpoint, stage_checkpoint, write_checkpoint
from relibra.rl.run.ranks import background_group, begin_stage, gather_json, is_peer_loss

GRACE_SECONDS = 30.0
"""Longest time that a run which failed waits for the checkpoint that is being written."""


class CheckpointWriter:
    """The checkpoints of a run on this rank, written one at a time.

    The thread's collectives have a process group of their own, so they run beside those of training. A checkpoint has
    its name only when it is whole: a process that is killed leaves the earlier ones.
    """

    def __init__(self, run: Path, settings: CheckpointSettings) -> None:
        self._run, self._settings = run, settings
        self._staged: StagedCheckpoint | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._seconds = 0.0

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Let a run that failed finish the checkpoint that is being written, unless a peer is lost."""
        if self._thread is not None and isinstance(error, Exception) and not is_peer_loss(error):
            self._thread.join(GRACE_SECONDS)

    def stage(self, step: int, *, models: Models, responses: Sequence[Response], state: dict[str, Any]) -> None:
        """Copy a checkpoint, after the one that is being written; collective.

        raises   EngineError, on all ranks, if that one could not be written
        """
        self.wait()
        with self._waiting(step):
            self._staged = stage_checkpoint(step, models=models, responses=responses, state=state)

    def start(self) -> None:
        """Write the staged checkpoint, if there is one; with `checkpoint.background` false, wait for it. Collective."""
        if self._staged is None:
            return
        staged, self._staged = self._staged, None
        self._thread = threading.Thread(target=self._write, args=(staged,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._settings.background:
            self.wait()

    def check(self) -> None:
        """Raise what went wrong while writing, on all ranks at the same step; collective."""
        if self._thread is None:
            return
        with self._waiting():
            ended_R = gather_json(None if self._thread.is_alive() else self._error is None)  # None: it still writes
        if False in ended_R or all(ended_R):
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; collective.

        raises   EngineError, on all ranks, if it could not be written
        """
        if self._thread is None:
            return
        with self._waiting():
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def take_seconds(self) -> float:
        """Return how long training waited for checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _write(self, staged: StagedCheckpoint) -> None:
        try:
            write_checkpoint(self._run, staged, self._settings.keep, background_group())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread of training
            self._error = error

    @contextmanager
    def _waiting(self, step: int | None = None) -> Iterator[None]:
        begin_stage("checkpoint" if step is None else f"checkpoint after step {step}")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
