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
from relibra.reporting.data.metrics import read_metrics
from relibra.routing.trace_files import read_trace
from tests.rl.ranks_at_work import TINY

RELIBRA = (sys.executable, "-m", "relibra")
PATIENCE_S = 240.0
"""How long a tiny run may take to say something: most of it is the import of torch on a busy machine."""
REWARD = """
def by_letters(response, row):
    return sum(map(ord, response)) % 3 / 2

rated = []

def raising(response, row):
    rated.append(row)
    if len(rated) > 1:  # not the row that is tried before the run
        raise ValueError("no idea")
    return 0
"""


def run_command(words: list[str], folder: Path | None = None, **options) -> subprocess.CompletedProcess:
    """Run relibra to its end, in a folder."""
    return subprocess.run(
        [*RELIBRA, *words],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        env=_environment(),
        cwd=folder,
        **options,
    )


def train(folder: Path, *overrides: str, command=RELIBRA, **options) -> subprocess.CompletedProcess:
    """Run a tiny training to its end."""
    words = [*command, "train", *TINY, f"run.folder={folder}", *overrides, "--json"]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=_environment(), **options)


def report(run: Path) -> subprocess.CompletedProcess:
    """Ask for the report of a run."""
    return run_command(["report", str(run), "--json"])


def make_user_task(folder: Path, characters: str = "0123456789+=,.") -> tuple[str, ...]:
    """Write a tiny model, prompts and a reward function into a folder; return the settings that train on them there."""
    from transformers import AutoModelForCausalLM

    from relibra.rl.config.run_config import load_config
    from relibra.rl.toy.character_tokenizer import CharacterTokenizer
    from relibra.rl.toy.model import built_in_config

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = CharacterTokenizer(characters)
    sizes = load_config(None, ["model.hidden_size=16", "model.num_experts=4", "model.num_layers=2"]).model
    AutoModelForCausalLM.from_config(built_in_config(sizes, tokenizer.vocab_size)).save_pretrained(folder / "model")
    tokenizer.save(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": (a + b) % 10} for a in range(10) for b in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARD)
    return (
        "task.name=prompts",
        "task.file=prompts.jsonl",
        "task.reward=my_rewards:by_letters",
        "model.path=model",
        "model.dtype=float32",
        "update.activations=keep",
        "update.learning_rate=2e-4",
        "rollout.max_response=12",
        "warmup.steps=0",
    )


class LongRun:
    """A training under way, in a process group of its own that ends with the `with` block."""

    def __init__(self, folder: Path, *overrides: str, resume: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = folder / "run"
        self._texts = {name: folder / f"{name}.txt" for name in ("stdout", "stderr")}
        about = ["--resume", str(self.run)] if resume else [*TINY, "run.steps=5000", f"run.folder={folder}"]
        with self._texts["stdout"].open("w") as out, self._texts["stderr"].open("w") as err:
            self.process = subprocess.Popen(
                [*RELIBRA, "train", *about, *overrides, "--json"],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
                cwd=folder,
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
        return [int(pid) for pid in children if b"relibra.rl.run.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]

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

    def exit_code(self, seconds: float = 120.0) -> int:
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


def check_whole(run: Path, responses: int = 8) -> int:
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
        assert trace.num_samples == responses, "a readable trace holds the samples of all ranks"
        readable.add(int(folder.name.removeprefix("step-")))
    kept = {step for step in metrics.steps if step >= len(metrics.steps) - 2 or step % 50 == 0}
    assert readable >= kept, "a finished step whose routes are kept has a readable trace"
    return len(metrics.steps)


def check_samples(run: Path, steps: int) -> None:
    """Check that samples.jsonl holds each sample of a step once, of finished steps in their order."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    seen = [(line["step"], line["sample"]) for line in lines]
    assert seen == sorted(set(seen))
    assert all(line["answer"] is not None for line in lines)
    assert {step for step, _ in seen} <= set(range(steps))


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
