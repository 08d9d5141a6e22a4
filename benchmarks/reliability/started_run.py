"""`relibra train` in processes of its own: start it, wait for a step, read what it trained.

Only processes that were started here are signalled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RUN = "run"
"""Name of the run in its folder."""
RUN_SECONDS = 300.0
"""What a tiny run may take on a busy machine, most of it for imports; longer counts as a run that hangs."""
GONE_SECONDS = 15.0
"""After the run, for its ranks to end."""
_POLL_SECONDS = 0.01
_MEASURED = ("seconds", "plan_seconds", "bytes")  # of the trace: none where a full disk dropped it
"""Columns of metrics.jsonl that differ between equal runs: times."""


class StartedRun:
    """A training under way, in a process group of its own that ends with the `with` block."""

    def __init__(self, words: Sequence[str], folder: Path, log: str) -> None:
        """Start `relibra train WORDS` in a folder; its stderr goes to the file `log` there."""
        self._log = folder / log
        with self._log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relibra", "train", *words, "--json"],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},  # all import the same
                start_new_session=True,
                cwd=folder,
            )

    def __enter__(self) -> StartedRun:
        """Return the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left of its process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(GONE_SECONDS)

    @property
    def stderr(self) -> str:
        """What the run has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in their order; fewer while they start."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return [int(pid) for pid in children if b"relibra.rl.run.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:
            return []

    def wait_for_ranks(self, number: int) -> bool:
        """Wait until all ranks were started; False: the run ended first."""
        return self._wait(lambda: len(self.ranks()) == number)

    def wait_for(self, text: str) -> bool:
        """Wait until the run has said something; False: it ended first."""
        return self._wait(lambda: text in self.stderr)

    def wait(self, seconds: float = RUN_SECONDS) -> int | None:
        """Return the exit code; None: the run hangs."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _wait(self, found: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + RUN_SECONDS
        while not found():
            if self.process.poll() is not None:
                return found()
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def run_to_end(words: Sequence[str], folder: Path, log: str) -> tuple[int | None, str]:
    """Run `relibra train WORDS`; return its exit code (None: it hung and was killed) and what it said."""
    with StartedRun(words, folder, log) as run:
        return run.wait(), run.stderr


def are_gone(pids: Sequence[int]) -> bool:
    """Wait until no process of these is left; False: one is there after GONE_SECONDS."""
    deadline = time.monotonic() + GONE_SECONDS
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Trained:
    """What a run has trained: rows of metrics.jsonl without times, bytes of samples.jsonl, a digest of the policy."""

    metrics: list[dict]
    samples: bytes
    policy: str


def read_trained(run: Path) -> Trained | None:
    """Read what a run has trained; None where a file is missing or has a line that is no row."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().decode().split("\n")
        rows = [json.loads(line) for line in lines if line]
        samples = (run / "samples.jsonl").read_bytes()
        for line in samples.decode().split("\n"):
            if line:
                json.loads(line)
        policy = hashlib.sha256((run / "policy" / "model.safetensors").read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    metrics = [{name: value for name, value in row.items() if name not in _MEASURED} for row in rows]
    return Trained(metrics, samples, policy)


def go_on(settings: Sequence[str], folder: Path, run: Path) -> tuple[bool, int | None, str]:
    """Resume a run; without a checkpoint remove it and start again.

    folder    where the process runs, and its log goes
    returns   whether it was started again, its exit code (None: it hung) and what it said
    """
    anew = not any((run / "checkpoints").glob("step-*"))
    if anew:
        shutil.rmtree(run, ignore_errors=True)
    return anew, *run_to_end(settings if anew else ("--resume", str(run)), folder, "resumed.txt")
