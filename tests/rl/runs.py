"""Starting `relibra train` as a user does, watching it, and reading what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from relibra.errors import TraceError
from relibra.reporting.metrics import read_metrics
from relibra.routing.trace_files import read_trace

from .ranks_at_work import TINY

RELIBRA = (sys.executable, "-m", "relibra")
PATIENCE_S = 120.0
"""How long a tiny run may take to say something: most of it is the import of torch on a busy machine."""


def train(folder: Path, *overrides: str, command=RELIBRA) -> subprocess.CompletedProcess:
    """Run a tiny training to its end."""
    words = [*command, "train", *TINY, f"run.folder={folder}", *overrides, "--json"]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=_environment())


def report(run: Path) -> subprocess.CompletedProcess:
    """Ask for the report of a run."""
    words = [*RELIBRA, "report", str(run), "--json"]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=_environment())


class LongRun:
    """A training under way, in a process group of its own that ends with the `with` block."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = folder / "run"
        self._texts = {name: folder / f"{name}.txt" for name in ("stdout", "stderr")}
        with self._texts["stdout"].open("w") as out, self._texts["stderr"].open("w") as err:
            self.process = subprocess.Popen(
                [*RELIBRA, "train", *TINY, "run.steps=5000", f"run.folder={folder}", *overrides, "--json"],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )

    def __enter__(self) -> LongRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.signal_all(signal.SIGKILL)
            self.process.wait(10)

    @property
    def stdout(self) -> str:
        return self._texts["stdout"].read_text()

    @property
    def stderr(self) -> str:
        return self._texts["stderr"].read_text()

    def wait_for(self, text: str) -> None:
        """Wait until the run has written `text` to stderr."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.stderr:
            assert self.process.poll() is None, f"the run ended before it said {text!r}: {self.stderr}"
            assert time.monotonic() < deadline, f"the run never said {text!r}: {self.stderr}"
            time.sleep(0.02)

    def workers(self) -> list[int]:
        """Return the process ids of the ranks, in their order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def wait_for_workers(self, number: int) -> list[int]:
        """Wait until so many ranks have been started."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.workers()) < number:
            assert time.monotonic() < deadline, f"the run never started {number} ranks: {self.stderr}"
            time.sleep(0.02)
        return self.workers()

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the run, as a terminal does."""
        os.killpg(self.process.pid, number)

    def exit_code(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)


def alive(pid: int) -> bool:
    """Say whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    """Wait until none of these processes is left."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"{left} are still there after {seconds} s"
        time.sleep(0.05)


def check_whole(run: Path) -> int:
    """Check that what an ended run left is whole or refused by its reader; return the number of finished steps."""
    assert json.loads((run / "config.json").read_text())["run"]["steps"] >= 0
    metrics = read_metrics(run / "metrics.jsonl")
    assert metrics.unreadable == 0
    assert metrics.steps == list(range(len(metrics.steps)))
    assert len({frozenset(row) for row in metrics.rows}) <= 1, "a row lacks what others have"
    readable = set()
    for folder in sorted((run / "traces").glob("*")):
        try:
            trace = read_trace(folder)
        except TraceError:
            continue
        trace.validate()
        assert trace.num_samples == 8, "a readable trace holds the samples of all ranks"
        readable.add(int(folder.name.removeprefix("step-")))
    assert readable >= set(metrics.steps), "a finished step has a readable trace"
    return len(metrics.steps)


def check_report(run: Path) -> None:
    """Check that the report of an ended run either works or says why not in one sentence."""
    done = report(run)
    if done.returncode == 0:
        assert Path(json.loads(done.stdout)["report"]).stat().st_size > 1000
    else:
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
